"""A plain function of arrays, traced once into a graph that MXNet runs in one call.

Called operator by operator, LeNet's forward and backward cost about 2 ms of Python a device and
step, and each operator asks for memory of its own. Traced, the same operators are one call, on
memory that is planned once. This is what ``hybridize(static_alloc=True, static_shape=True)`` does
for a Gluon Block, here for a function.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Callable, Sequence

import mxnet as mx

from gluonpar.runtime import memory

# Operators of backward that MXNet's engine is given as one. With its own 15 all of LeNet's backward
# is one, and no gradient could be summed before the last is there. More of them cost microseconds.
_BACKWARD_BULK = 4


def traceable(function: Callable) -> Callable:
    """Decorator: promise that ``function`` takes symbols as well as arrays, and looks at no values.

    It gets its operators from :func:`operators`, and asks no argument for shape or dtype.
    """
    function.traceable = True
    return function


def operators(x: mx.nd.NDArray | mx.sym.Symbol) -> ModuleType:
    """``mx.sym`` for a symbol, ``mx.nd`` for an array: the operators that take ``x``."""
    return mx.sym if isinstance(x, mx.sym.Symbol) else mx.nd


def losses(
    model: Callable, loss: Callable, X: mx.nd.NDArray, y: mx.nd.NDArray, params: Sequence
) -> mx.nd.NDArray:
    """``loss(model(X, params), y)``; as a traced graph if both functions are :func:`traceable`."""
    if not (getattr(model, "traceable", False) and getattr(loss, "traceable", False)):
        return loss(model(X, params), y)
    return _graph_of(model, loss, params)(X, *params, y)


def _graph_of(model: Callable, loss: Callable, params: Sequence) -> Callable:
    """The traced graph for these parameters, kept with them.

    A graph on static memory holds on to the gradients that it first wrote, and MXNet would make
    those the gradients of whatever parameters it is given later. So each list has its own.
    """
    grads = (param.grad for param in params)
    first = next((memory.chunk(grad) for grad in grads if grad is not None), None)
    key = (model, loss, len(params), first)
    graphs = getattr(params, "graphs", None)  # a Replica keeps its own
    if graphs is None:
        return _traced_for_lists(*key)
    if key not in graphs:
        graphs[key] = _traced(model, loss, len(params))
    return graphs[key]


@functools.lru_cache(64)
def _traced_for_lists(model: Callable, loss: Callable, num_params: int, _: int | None) -> Callable:
    return _traced(model, loss, num_params)


def _traced(model: Callable, loss: Callable, num_params: int) -> Callable:
    X, y = mx.sym.var("X"), mx.sym.var("y")
    params = [mx.sym.var(f"param{i}") for i in range(num_params)]
    graph = loss(model(X, params), y)
    names = [symbol.name for symbol in (X, *params, y)]
    order = [names.index(name) for name in graph.list_inputs()]
    varying = [i for i, j in enumerate(order) if j in (0, len(names) - 1)]
    fixed = [i for i in range(len(order)) if i not in varying]
    flags = {
        "static_alloc": True,
        "static_shape": True,
        "backward_bulk_size": _BACKWARD_BULK,
        "data_indices": varying,
        "param_indices": fixed,
    }
    run = mx.nd.CachedOp(graph, list(flags.items()))
    return lambda *arrays: run(*[arrays[j] for j in order])
