"""A plain function of arrays, traced once into a graph that MXNet runs in one call.

Operator by operator, LeNet's forward and backward cost about 2 ms of Python per device and step,
and each operator allocates memory. A graph is one call, and its memory is planned once, as
``hybridize(static_alloc=True, static_shape=True)`` does for a Gluon Block.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from types import ModuleType
from typing import Callable, Iterator, Sequence, TypeVar

import mxnet as mx

from gluonpar.runtime import memory

# The number of backward's operators that MXNet's engine runs as one. Gradients can be summed only
# when such a bulk has ended (on a GPU it waits for the stream): several buckets need smaller ones.
_DEFAULT_BULK_SIZE, _BULK_SIZE_OF_BUCKETS = 15, 4

_traced_for = contextvars.ContextVar("device type of the arrays that are traced for", default="")

F = TypeVar("F", bound=Callable)


def traceable(function: F) -> F:
    """Decorate a function that takes symbols as well as arrays.

    :func:`gluonpar.train_batch` traces such a model once for each result of
    :func:`gluonpar.get_params` into a graph. MXNet runs it in one call and in less memory, as a
    hybridized Block. The function must use :func:`operators`, and must not read values, shapes or
    dtypes of its arguments. The loss must be traceable, too; the default loss is.

    >>> import mxnet as mx
    >>> @traceable
    ... def linear(X, params):
    ...     return operators(X).FullyConnected(X, *params, num_hidden=1)
    >>> linear(mx.nd.ones((3, 2)), [mx.nd.ones((1, 2)), mx.nd.zeros((1,))]).shape
    (3, 1)
    """
    function.traceable = True  # type: ignore[attr-defined]
    return function


def operators(x: mx.nd.NDArray | mx.sym.Symbol) -> ModuleType:
    """Return the operators for ``x``: ``mx.sym`` for a symbol, ``mx.nd`` for an array."""
    return mx.sym if isinstance(x, mx.sym.Symbol) else mx.nd


@contextlib.contextmanager
def tracing_for(x: mx.nd.NDArray | mx.sym.Symbol) -> Iterator[None]:
    """Let symbols stand for arrays on devices of the type that ``x`` is on, in this context."""
    before = _traced_for.set(device_type(x))
    try:
        yield
    finally:
        _traced_for.reset(before)


def device_type(x: mx.nd.NDArray | mx.sym.Symbol) -> str:
    """Return 'cpu' or 'gpu': where operators on ``x`` run; "" for a symbol of which it is unknown.

    It is known while a graph is traced for given arrays (:func:`tracing_for`), not while one is
    written to a file, which any device may read.
    """
    if isinstance(x, mx.sym.Symbol):
        return _traced_for.get()
    return memory.context(x).device_type.partition("_")[0]  # cpu_pinned and cpu_shared are CPUs


def losses(
    model: Callable,
    loss: Callable,
    X: mx.nd.NDArray,
    y: mx.nd.NDArray,
    params: Sequence,
    bucket_bytes: float = math.inf,
) -> mx.nd.NDArray:
    """Return ``loss(model(X, params), y)``, by a traced graph if both are :func:`traceable`.

    ``params`` must then be a :class:`gluonpar.replicas.Replica`, which has graphs of its own: a
    graph on static memory writes into the gradients that it wrote first, whatever its arguments.
    Gradients will be summed in buckets of ``bucket_bytes``.
    """
    graphs = getattr(params, "graphs", None)
    both_traceable = getattr(model, "traceable", False) and getattr(loss, "traceable", False)
    if graphs is None or not both_traceable:
        return loss(model(X, params), y)
    grads = tuple(map(memory.grad_chunk, params))
    one_bucket = sum(map(memory.num_bytes, params)) <= bucket_bytes
    bulk_size = _DEFAULT_BULK_SIZE if one_bucket else _BULK_SIZE_OF_BUCKETS
    key = (model, loss, grads, bulk_size, device_type(X))
    if key not in graphs:
        with tracing_for(X):
            graphs[key] = _trace(model, loss, len(params), bulk_size)
    return graphs[key](X, *params, y)


def _trace(model: Callable, loss: Callable, num_params: int, bulk_size: int) -> Callable:
    X, y = mx.sym.var("X"), mx.sym.var("y")
    params = [mx.sym.var(f"param{i}") for i in range(num_params)]
    graph = loss(model(X, params), y)
    names, inputs = [symbol.name for symbol in (X, *params, y)], graph.list_inputs()
    varying = [i for i, name in enumerate(inputs) if name in ("X", "y")]
    constant = [i for i in range(len(inputs)) if i not in varying]
    flags = {"data_indices": varying, "param_indices": constant, "backward_bulk_size": bulk_size}
    run = mx.nd.CachedOp(graph, [*flags.items(), ("static_alloc", True), ("static_shape", True)])
    order = [names.index(name) for name in inputs]
    return lambda *arrays: run(*[arrays[j] for j in order])
