"""Blocks with ``static_shape`` that share parameters keep no arrays of gradients.

In MXNet 1.9.1 a graph with ``static_shape`` keeps the arrays to which it first wrote. Two such
graphs, of two heads on one body, may keep the same array, and write to it in turn before MXNet adds
what both have written. That is put right for parameters that gluonpar trains, and for no others.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterable

from mxnet import gluon

from gluonpar.runtime import private_fields, tape

_trained: weakref.WeakSet[gluon.Parameter] = weakref.WeakSet()
_blocks: weakref.WeakSet[gluon.HybridBlock] = weakref.WeakSet()  # that have graphs


def separate(params: Iterable[gluon.Parameter]) -> None:
    """Have no two graphs, made now or later, that share one of ``params`` keep the same array."""
    with tape.lock:
        new = {*params}.difference(_trained)
        _trained.update(new)
        for block in [*_blocks]:
            if not new.isdisjoint(private_fields.static_params(block)):
                _separate(block)


@private_fields.around(private_fields.BUILDS_GRAPH)
def _separate_new(build: Callable, block: gluon.HybridBlock, *args: Any) -> None:
    build(block, *args)
    with tape.lock:
        _blocks.add(block)
        _separate(block)


def _separate(block: gluon.HybridBlock) -> None:
    params = private_fields.static_params(block)
    if params.isdisjoint(_trained):
        return
    sharing = [one for one in _blocks if params & private_fields.static_params(one)]
    if len(sharing) > 1:
        for each in sharing:
            private_fields.keep_no_arrays(each)
