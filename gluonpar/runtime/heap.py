"""The memory of operators on CPU contexts: glibc's heap, and each thread's pool of workspaces.

From the first contexts that gluonpar is given, the heap keeps freed memory: returning an operator's
output to the system would cost an mmap, page faults and an munmap in every step. The first steps
free much that later steps do not need, such as initial values, so after some steps free memory is
returned. Settings for glibc's heap in the environment are kept.

The operators that a thread pushes on CPU contexts draw the workspaces of its pool in turn, and wait
until earlier operators with the same workspace have ended. With MXNet's pool of 4, two contexts
often wait for each other; with 256, rarely. So when gluonpar is first given several contexts, the
thread's pool is replaced. A workspace keeps the memory of the largest operator that has used it. So
each step draws from the first workspace on: an operator gets the one that it had in the step
before. Otherwise all 256 would grow to the size of the largest operator.
Private to MXNet 1.9.1: ``ResourceManagerImpl``, a thread's manager, and ``ResourceTempSpace``, its
pool (src/resource.cc).
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from typing import Sequence

import mxnet as mx
from mxnet.base import _LIB

from gluonpar.runtime import engine, memory

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_VARIABLES = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
_SET_BY_USER = not _VARIABLES.isdisjoint(os.environ)
_libc = ctypes.CDLL(None)
_num_steps = 0  # that have ended

_VARIABLE, _SIZE, _NEW_SIZE = "MXNET_CPU_TEMP_COPY", 4, 256
_SIZE_SET_BY_USER = _VARIABLE in os.environ
_POOL_OFFSET, _POOL_BYTES = 72, 64  # of the pool's address in a manager, and of a pool
# A pool has its context, the addresses at which the workspaces, and the list of pointers to them,
# begin and end, and the number of workspaces that were drawn.
_POOL, _ENTRY_BYTES, _DRAWN_OFFSET = struct.Struct("=iiQQ8xQQ8xQ"), (72, 32), 56
_manager = _LIB["_ZN5mxnet15ResourceManager3GetEv"]  # mxnet::ResourceManager::Get()
# ResourceTempSpace<kTempSpace>::ResourceTempSpace(Context, size_t)
_make_pool = _LIB[
    "_ZN5mxnet8resource19ResourceManagerImpl"
    "17ResourceTempSpaceILNS_15ResourceRequest4TypeE1EEC1ENS_7ContextEm"
]
_manager.restype = _libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_make_pool.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t]


@functools.lru_cache(None)
def keep_freed() -> None:
    """Make glibc keep freed memory from now on, unless the user has set how much it keeps."""
    if not _SET_BY_USER:
        _libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        _libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


class _OfThread(threading.local):
    drawn: ctypes.c_uint64 | None = None  # of a pool of _NEW_SIZE
    num_steps = 0  # when workspaces were drawn from the first one on


_this_thread = _OfThread()


def end_step(after: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    """Have the next step draw the same workspaces; after some steps return free memory.

    These are the steps 1, 2, 4, 8, ... A worker of the engine returns free memory to the system
    when the step has computed the arrays of ``after``.
    """
    global _num_steps
    _num_steps += 1
    draw_from_first()
    if _num_steps & (_num_steps - 1) or _SET_BY_USER:
        return
    arrays = [array for arrays in after for array in arrays]
    if arrays and arrays[0].context.device_type == "cpu":
        trim = functools.partial(_libc.malloc_trim, 0)
        engine.push(trim, arrays[0].context, reads=arrays, name="gluonpar.heap")


def draw_from_first() -> None:
    """Have this thread's next operators draw the workspaces from the first one on."""
    _this_thread.num_steps = _num_steps
    if _this_thread.drawn is not None:
        _this_thread.drawn.value = 0


def follow_step() -> None:
    """Call :func:`draw_from_first`, if a step has ended, on any thread, since this thread did."""
    if _this_thread.num_steps != _num_steps:
        draw_from_first()


def widen() -> None:
    """Give this thread's next operators 256 workspaces, unless the user has set another number.

    Raises RuntimeError if the memory of another MXNet has another layout.
    """
    if _SIZE_SET_BY_USER or _this_thread.drawn is not None:
        return
    place, cpu = ctypes.c_uint64.from_address(_manager() + _POOL_OFFSET), mx.cpu().device_typeid
    new = _libc.malloc(_POOL_BYTES)  # MXNet frees it at the end
    _make_pool(new, cpu, _NEW_SIZE)  # on cpu(0), whose number is 0
    for pool, size in ((place.value, _SIZE), (new, _NEW_SIZE)):
        kind, number, *ends, drawn = _POOL.unpack(ctypes.string_at(pool, _POOL.size))
        got = kind, number, ends[1] - ends[0], ends[3] - ends[2], drawn < 1 << 32
        want = cpu, 0, *(size * num_bytes for num_bytes in _ENTRY_BYTES), True
        memory.check_layout("pools of workspaces", got, want, f", or set {_VARIABLE}={_NEW_SIZE}")
    place.value = new  # earlier operators may still use the old pool
    _this_thread.drawn = ctypes.c_uint64.from_address(new + _DRAWN_OFFSET)
