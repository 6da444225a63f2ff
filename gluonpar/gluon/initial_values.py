"""Parameters that start with the same values on all ranks of a job: those of rank 0.

A parameter whose shape is not known yet is initialised in the first forward pass, and any parameter
again with ``force_reinit``. Then rank 0's values must be there before they are used, and MXNet has
no hook for that. Both call ``Parameter._init_impl``, which never changes again, as MXNet is
retired; so it is wrapped, in a job of several processes only.
"""

from __future__ import annotations

import functools
import weakref
from typing import Callable, Sequence

import mxnet as mx
from mxnet import gluon

from gluonpar import cluster
from gluonpar.collectives import Exchange, in_buckets
from gluonpar.runtime import private_fields

_alike: weakref.WeakSet[gluon.Parameter] = weakref.WeakSet()


def start_alike(params: Sequence[gluon.Parameter]) -> None:
    """Give ``params`` rank 0's values, now and whenever they are initialised, on all devices.

    Random operators then draw other numbers on each rank.

    All ranks must call this, and initialise, with the same parameters in the same order.
    """
    if cluster.size() == 1:
        return
    _wrap()
    dense = [param for param in params if private_fields.stype(param) == "default"]
    _alike.update(dense)
    lists = map(private_fields.values, dense)
    _broadcast([arrays for arrays in lists if arrays is not None])
    cluster.draw_apart(params[0].list_ctx() if params else ())


def _broadcast(lists: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    if lists:
        Exchange([array.context for array in lists[0]]).broadcast(in_buckets(lists))


@functools.lru_cache(None)
def _wrap() -> None:
    def alike(initialise: Callable) -> Callable:
        @functools.wraps(initialise)
        def initialise_alike(param: gluon.Parameter, *args, **kwargs) -> None:
            initialise(param, *args, **kwargs)
            if param in _alike:
                _broadcast([private_fields.values(param)])

        return initialise_alike

    private_fields.wrap(private_fields.INITIALISES, alike)
