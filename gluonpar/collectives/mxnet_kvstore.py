"""kvstore: MXNet's own reduction, as used by its gluon.Trainer: for comparison.

A kvstore of type 'device' sums on a device that it chooses and copies the sum back. On the CPU it
first copies all arrays into its own buffers (src/kvstore/comm.h): K n more bytes of memory, and
about three times ``host``'s time. The type 'nccl' is not used: such a store keeps the devices and
the shape of its first call for ever, and refuses others.
"""

from __future__ import annotations

import functools

import mxnet as mx

from gluonpar.collectives import executor
from gluonpar.plans import register_executor

# A store keeps buffers for each of its keys. So there is a store for each kind of arrays, and for
# the kinds used last only.
_STORES = 32


@register_executor("kvstore")
def allreduce(lists: executor.Lists, op: str) -> None:
    """Sum with MXNet's own kvstore of type 'device'."""
    if op != "sum":
        raise ValueError(f"op must be 'sum' or 'mean' with algorithm 'kvstore', got {op!r}")
    with executor.joined(lists) as whole:
        flat = executor.flattened(whole)
        contexts = tuple(array.context for array in flat)
        _store(contexts, flat[0].size, flat[0].dtype).pushpull(0, flat, out=flat)


@functools.lru_cache(_STORES)
def _store(ctx: tuple[mx.Context, ...], size: int, dtype: type) -> mx.kvstore.KVStore:
    store = mx.kvstore.create("device")
    store.init(0, mx.nd.zeros((size,), mx.cpu(0), dtype))
    return store
