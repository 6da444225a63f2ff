"""Trained networks as ONNX files, which other programs run; by MXNet's own exporter.

MXNet 1.9.1 has an exporter (``mxnet.onnx``) for ONNX's operator sets 12 and 13, and writes those
operators into a file that says whichever set the installed ``onnx`` has newest. So its translator
is called here, and the file says 14. It also reads ``onnx.mapping``, which ``onnx`` 1.18 removed,
and has its graph checked by the newest set's rules; both are replaced while it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import types
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
import numpy as np

from gluonpar.checkpoint import files

# MXNet's newest translations are for 13. Nothing that they write means something else in 14, and
# readers that take a BatchNormalization of 13 for one that is being trained (onnx's reference) get
# that right in 14. The file format is the one that came with it.
OPERATOR_SET, IR_VERSION = 14, 7
INPUT, OUTPUT = "data", "scores"


def check() -> None:
    """Raise ImportError, with the remedy, unless the package ``onnx`` is there."""
    try:
        importlib.import_module("onnx.helper").np_dtype_to_tensor_dtype  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"ONNX files are written with the package onnx, 1.16 or later ({error}): "
            "pip install 'gluonpar[onnx]'"
        ) from error


def export_onnx(
    path: str | os.PathLike,
    model: mx.gluon.HybridBlock | Callable,
    input_shape: Sequence[int],
    params: Sequence[mx.nd.NDArray] | None = None,
    dtype: str = "float32",
) -> None:
    """Write ``model`` with its parameters to ``path``, as an ONNX file (operator set 14).

    ``model`` is an initialised ``HybridBlock`` of one input; or a function ``model(X, params)`` of
    MXNet's operators, such as :func:`gluonpar.lenet`, and ``params`` one device's list of
    arrays. Of parameters on several devices the first one's are taken. The file's input is ``data``
    of ``dtype`` and ``input_shape``, but with any number of samples; its outputs are ``scores``, or
    ``scores0``, ``scores1``, ... It computes what MXNet does outside ``autograd.record()``, up to
    rounding. Waits for the parameters; the file is there whole or not at all.

    ImportError without the package ``onnx`` (extra ``onnx``); ValueError for an operator that
    MXNet's exporter does not know, or parameters without values; TypeError for a model that is
    neither; OSError where the disk refuses.

    >>> import mxnet as mx, os, tempfile
    >>> net = mx.gluon.nn.Dense(3, in_units=4)
    >>> net.initialize()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_onnx(os.path.join(folder, "net.onnx"), net, input_shape=(1, 4))
    ...     print(os.listdir(folder))
    ['net.onnx']
    """
    check()
    symbol, values = _graph(model, params)
    content = _converted(symbol, values, tuple(input_shape), np.dtype(dtype))
    with files.replacing(pathlib.Path(path)) as file:
        file.write(content)


def _graph(model: Any, params: Any) -> tuple[mx.sym.Symbol, dict[str, mx.nd.NDArray]]:
    """The network as a symbol of the input and its parameters, and these by name."""
    data = mx.sym.var(INPUT)
    if isinstance(model, mx.gluon.HybridBlock):
        blocks = model.collect_params().values()
        missing = [param.name for param in blocks if param._data is None]
        if missing:
            raise ValueError(
                f"parameter {missing[0]} has no values yet; initialize the network first, and let "
                "it see one batch if it learns its shapes from that"
            )
        if mx.util.is_np_array():
            data = data.as_np_ndarray()
        output, values = model(data), {param.name: param.list_data()[0] for param in blocks}
    elif callable(model) and params is not None:
        values = {f"param{i}": param for i, param in enumerate(params)}
        output = model(data, [mx.sym.var(name, shape=p.shape) for name, p in values.items()])
    else:
        raise TypeError(
            f"model={model!r} is neither a HybridBlock nor a function with params=; give one"
        )
    outputs = [output] if isinstance(output, mx.sym.Symbol) else output
    values = {name: value.as_nd_ndarray() for name, value in values.items()}
    return mx.sym.Group([of.as_nd_ndarray() for of in outputs]), values


def _converted(
    symbol: mx.sym.Symbol, values: dict[str, mx.nd.NDArray], shape: tuple, dtype: np.dtype
) -> bytes:
    with _as_the_exporter_knows_onnx():
        import onnx
        from mxnet.onnx.mx2onnx._export_onnx import MXNetGraph

        try:
            graph = MXNetGraph().create_onnx_graph_proto(
                symbol,
                values,
                [shape],
                [onnx.helper.np_dtype_to_tensor_dtype(dtype)],
                opset_version=OPERATOR_SET,
                dynamic=True,
                dynamic_input_shapes=[(None, *shape[1:])],
            )
        except AttributeError as error:  # what the exporter raises for an unknown operator
            raise ValueError(f"MXNet cannot write this network as ONNX: {error}") from error
    made = onnx.helper.make_model(
        _tidied(graph),
        opset_imports=[onnx.helper.make_opsetid("", OPERATOR_SET)],
        ir_version=IR_VERSION,
        producer_name="gluonpar",
    )
    onnx.checker.check_model(made, full_check=True)
    return made.SerializeToString()


def _tidied(graph: Any) -> Any:
    """The parameters are not inputs, and outputs have names that one can know."""
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]
    del graph.input[:]
    graph.input.extend(inputs)
    names = [OUTPUT] if len(graph.output) == 1 else [f"{OUTPUT}{i}" for i in range(99)]
    renamed = {value.name: name for value, name in zip(graph.output, names)}
    for node in graph.node:
        for places in (node.input, node.output):
            places[:] = [renamed.get(name, name) for name in places]
    for value in graph.output:
        value.name = renamed[value.name]
    return graph


@contextlib.contextmanager
def _as_the_exporter_knows_onnx() -> Iterator[None]:
    """``onnx.mapping``, between dtypes and ONNX's numbers; a checker that finds no fault."""
    import onnx
    from onnx import helper

    class ToNumber(dict):
        def __missing__(self, dtype):
            return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    class ToDtype(dict):
        def __missing__(self, number):
            return helper.tensor_dtype_to_np_dtype(number)

    mapping = types.SimpleNamespace(
        NP_TYPE_TO_TENSOR_TYPE=ToNumber(), TENSOR_TYPE_TO_NP_TYPE=ToDtype()
    )
    checker = types.SimpleNamespace(check_graph=lambda graph: None)  # the whole file is, later
    before = {name: vars(onnx)[name] for name in ("mapping", "checker") if name in vars(onnx)}
    onnx.mapping, onnx.checker = mapping, checker
    try:
        yield
    finally:
        del onnx.mapping
        vars(onnx).update(before)
