"""Copies of NumPy arrays on devices; to GPUs they go through pinned memory, which is kept."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from typing import Iterator

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import _LIB, check_call

from gluonpar.runtime import memory

_COPIES_UNDER_WAY = 4
_pinned_lock = threading.Lock()


def from_numpy(values: np.ndarray, ctx: mx.Context) -> mx.nd.NDArray:
    """Return a copy of ``values`` on ``ctx``: ``mx.np`` under ``npx.set_np()``, else ``mx.nd``.

    On a CPU context it does not wait. ``mx.nd.array`` would: it queues an operator behind those
    that the context is computing, although nothing can depend on a new array yet. To a GPU
    ``values`` go through pinned memory, which is kept; it waits for an earlier copy from there, of
    which four may be under way, and ``mx.nd.array`` would wait for this one.
    """
    array = (mx.np if mx.util.is_np_array() else mx.nd).empty(
        values.shape, dtype=values.dtype, ctx=ctx
    )
    if not values.size:
        return array
    if ctx.device_type != "gpu":
        np.copyto(memory.view(array).reshape(values.shape), values)
        return array
    with pinned(ctx, values.size, values.dtype) as staged:
        check_call(_LIB.MXNDArrayWaitToWrite(staged.handle))  # for the copy it was last used for
        np.copyto(memory.view(staged).reshape(values.shape), values)
        staged.reshape(values.shape).copyto(array.as_nd_ndarray())
    return array


@contextlib.contextmanager
def pinned(ctx: mx.Context, size: int, dtype: np.dtype | str) -> Iterator[mx.nd.NDArray]:
    """Give a flat array in pinned memory of the GPU ``ctx``, which is kept and will be given again.

    Push all operators on it before the ``with`` block ends: until then no other thread gets it, and
    afterwards the engine orders them before those of whatever uses it next.
    """
    with _pinned_lock, autograd.pause():  # recording, a slice would be a copy
        rounded = 1 << (size - 1).bit_length()  # few sizes, so that few arrays are kept
        yield next(_pinned(ctx.device_id, rounded, np.dtype(dtype)))[:size]


@functools.lru_cache(None)  # MXNet frees pinned memory at once, and allocating it takes long
def _pinned(device_id: int, size: int, dtype: np.dtype) -> Iterator[mx.nd.NDArray]:
    """Give flat arrays in turns, made when first used: a copy from each may be under way."""
    ctx = mx.cpu_pinned(device_id)
    return itertools.cycle(mx.nd.empty((size,), ctx, dtype) for _ in range(_COPIES_UNDER_WAY))
