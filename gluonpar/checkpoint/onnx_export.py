"""Writes trained networks as ONNX files for other programs, through MXNet's own exporter.

MXNet 1.9.1's exporter (``mxnet.onnx``) writes operators of ONNX's sets 12 and 13 into a file that
claims the newest set of the installed package ``onnx``. So its translator is called directly here.
The translator also needs ``onnx.mapping``, which ``onnx`` 1.18 removed, and checks its graph by the
rules of the newest set. Both are replaced while it runs, and the finished file is checked instead.
"""

from __future__ import annotations

import os
import types
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np

from gluonpar.checkpoint import files
from gluonpar.runtime import private_fields

# MXNet's newest translations are for set 13, and mean the same in 14. Some readers, such as onnx's
# reference evaluator, run a BatchNormalization of set 13 as in training, but not one of set 14.
OPERATOR_SET, IR_VERSION = 14, 7  # the file format that came with set 14


def check_onnx() -> None:
    """Raise ImportError with the remedy unless a suitable package ``onnx`` is installed."""
    try:
        from onnx.helper import np_dtype_to_tensor_dtype  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"ONNX files need onnx, 1.16 or later ({error}): pip install 'onnx>=1.16'"
        ) from error


def export_onnx(
    path: str | os.PathLike,
    model: mx.gluon.HybridBlock | Callable,
    input_shape: Sequence[int],
    params: Sequence[mx.nd.NDArray] | None = None,
    dtype: str = "float32",
) -> None:
    """Write ``model`` with its parameters to ``path`` as an ONNX file (operator set 14).

    ``model`` is an initialized ``HybridBlock`` with one input, or a function ``model(X, params)``
    of MXNet operators, such as :func:`gluonpar.lenet`, with ``params``, one device's list of
    arrays. A block's parameters are taken from its first device. The file's input is ``data`` of
    ``dtype`` and ``input_shape``, but with any first length; its outputs are ``scores``, or
    ``scores0``, ``scores1``, ... It computes what MXNet does outside ``autograd.record()``, up to
    rounding. Waits for the parameters. The file is written whole or not at all.

    Raises ImportError without the package ``onnx`` (extra ``onnx``); ValueError for an operator
    that MXNet's exporter does not support; RuntimeError for parameters without values; TypeError
    for another kind of model; OSError if the file system refuses.

    >>> import mxnet as mx, os, tempfile
    >>> net = mx.gluon.nn.Dense(3, in_units=4)
    >>> net.initialize()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_onnx(os.path.join(folder, "net.onnx"), net, input_shape=(1, 4))
    ...     print(os.listdir(folder))
    ['net.onnx']
    """
    check_onnx()
    import onnx

    symbol, values = _symbol(model, params)
    graph = _translated(symbol, values, tuple(input_shape), np.dtype(dtype))
    for value in [value for value in graph.input if value.name in values]:
        graph.input.remove(value)  # a parameter, which the graph has as an initializer
    sets = [onnx.helper.make_opsetid("", OPERATOR_SET)]
    options = {"ir_version": IR_VERSION, "producer_name": "gluonpar"}
    written = onnx.helper.make_model(graph, opset_imports=sets, **options)
    onnx.checker.check_model(written, full_check=True)
    with files.atomic_write(path) as file:
        file.write(written.SerializeToString())


def _symbol(model: Any, params: Any) -> tuple[mx.sym.Symbol, dict[str, mx.nd.NDArray]]:
    """Return the network as a symbol of its input and parameters, and the parameters by name."""
    data = mx.sym.var("data")
    if isinstance(model, mx.gluon.HybridBlock):
        if mx.util.is_np_array():
            data = data.as_np_ndarray()
        values = {p.name: p.list_data()[0] for p in model.collect_params().values()}
        output = model(data)
    elif callable(model) and params is not None:
        values = {f"param{i}": param for i, param in enumerate(params)}
        output = model(data, [mx.sym.var(name, shape=p.shape) for name, p in values.items()])
    else:
        raise TypeError(f"model must be a HybridBlock, or a function with params=, got {model!r}")
    values = {name: value.as_nd_ndarray() for name, value in values.items()}
    if isinstance(output, mx.sym.Symbol):
        return mx.sym.identity(output.as_nd_ndarray(), name="scores"), values
    named = (mx.sym.identity(of.as_nd_ndarray(), name=f"scores{i}") for i, of in enumerate(output))
    return mx.sym.Group([*named]), values


def _translated(symbol: mx.sym.Symbol, values: dict, shape: tuple, dtype: np.dtype) -> Any:
    """Return the ONNX graph that MXNet's exporter makes, with ``onnx`` as the exporter needs it."""
    from unittest import mock  # slow to import, and not needed by programs that export nothing

    import onnx

    dtypes = map(np.dtype, "bool uint8 int8 int32 int64 float16 float32 float64".split())
    by_dtype = {one: onnx.helper.np_dtype_to_tensor_dtype(one) for one in dtypes}
    mapping = types.SimpleNamespace(NP_TYPE_TO_TENSOR_TYPE=by_dtype)
    mapping.TENSOR_TYPE_TO_NP_TYPE = {number: one for one, number in by_dtype.items()}
    patched = mock.patch.object(onnx, "mapping", mapping, create=True)
    options = {"dynamic": True, "dynamic_input_shapes": [(None, *shape[1:])]}
    with patched, mock.patch.object(onnx.checker, "check_graph"):
        try:
            return private_fields.onnx_graph()().create_onnx_graph_proto(
                symbol, values, [shape], [by_dtype[dtype]], opset_version=OPERATOR_SET, **options
            )
        except AttributeError as error:  # what the exporter raises for an unknown operator
            raise ValueError(f"MXNet cannot write this network as ONNX: {error}") from error
