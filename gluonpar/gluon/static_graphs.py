"""Hybridized blocks with ``static_shape`` that share parameters, such as two heads on one body.

MXNet 1.9.1 has such a graph keep the arrays to which it first wrote gradients. In a pass through
one of the blocks only, it makes them the parameters' gradients, but not those that
``Parameter.grad`` returns, which are then of an earlier pass. And two graphs that have kept the
same array write to it in turn before MXNet adds what both have written. So parameters of several
such graphs are data to these: they keep no arrays of them, as without ``static_shape``.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Callable

from mxnet import gluon

from gluonpar.runtime import private_fields

_lock = threading.Lock()
# By parameter, the blocks that have had a graph of it; by block, what its graph takes as data.
_blocks: weakref.WeakKeyDictionary[gluon.Parameter, weakref.WeakSet[gluon.HybridBlock]]
_blocks = weakref.WeakKeyDictionary()
_as_data: weakref.WeakKeyDictionary[gluon.HybridBlock, set[gluon.Parameter]]
_as_data = weakref.WeakKeyDictionary()


@private_fields.around(private_fields.BUILDS_GRAPH)
def _build(build: Callable, block: gluon.HybridBlock, *args: Any) -> None:
    """Have the graphs of all blocks with a parameter of the new graph take that as data."""
    build(block, *args)
    with _lock:
        _as_data.pop(block, None)
        for param in private_fields.static_params(block):
            _blocks.setdefault(param, weakref.WeakSet()).add(block)
        _share(block)


def _share(block: gluon.HybridBlock) -> None:
    params, shared = private_fields.static_params(block), set()
    for other in set().union(*map(_blocks.__getitem__, params)) - {block}:
        both = params & private_fields.static_params(other)
        shared |= both
        _take_as_data(other, both)
    _take_as_data(block, shared)


def _take_as_data(block: gluon.HybridBlock, params: set[gluon.Parameter]) -> None:
    before = _as_data.get(block, set())
    if not params <= before:
        _as_data[block] = before | params
        private_fields.make_graph(block, _as_data[block])
