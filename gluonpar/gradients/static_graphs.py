"""Has graphs that share parameters which gluonpar trains keep no arrays of gradients.

In MXNet 1.9.1 a graph with ``static_shape`` keeps the arrays to which it first wrote. Two such
graphs, of two heads on one body, may keep the same array, and write to it in turn before MXNet adds
what both have written.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterable

from mxnet import gluon

from gluonpar.gradients.records import OfParameter, tracked
from gluonpar.runtime import private_fields, tape

_blocks: weakref.WeakSet[gluon.HybridBlock] = weakref.WeakSet()  # the blocks that have graphs


def track(params: Iterable[gluon.Parameter]) -> list[OfParameter]:
    """Follow the gradients of ``params``, which may be deferred, and return their records."""
    return [tracked.get(param) or tracked.setdefault(param, OfParameter(param)) for param in params]


def adopt(params: Iterable[gluon.Parameter]) -> list[OfParameter]:
    """Have the gradients of ``params`` be where ``list_grad()`` looks, and return their records.

    This holds for graphs made before and later.
    """
    with tape.lock:
        records = track(params)
        new = [record for record in records if not record.is_adopted]
        for record in new:
            record.adopt()
        adopted = {record.param() for record in new}
        for block in [*_blocks]:
            if not adopted.isdisjoint(private_fields.static_params(block)):
                _separate(block)
    return records


@private_fields.around(private_fields.BUILDS_GRAPH)
def _separate_new(build: Callable, block: gluon.HybridBlock, *args: Any) -> None:
    build(block, *args)
    with tape.lock:
        _blocks.add(block)
        params = private_fields.static_params(block)
        if any(param in tracked and tracked[param].is_adopted for param in params):
            _separate(block)


def _separate(block: gluon.HybridBlock) -> None:
    """If blocks share parameters with this one, have it and them keep no arrays."""
    params = private_fields.static_params(block)
    sharing = [one for one in _blocks if params & private_fields.static_params(one)]
    if len(sharing) > 1:
        for each in sharing:
            private_fields.keep_no_arrays(each)
