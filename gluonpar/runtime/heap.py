"""The memory of operators on CPU contexts: glibc's heap, and each thread's pool of workspaces.

From the first contexts that gluonpar is given, the heap keeps freed memory: returning an operator's
output to the system would cost an mmap, page faults and an munmap in every step. The first steps
free much that later steps do not need, such as initial values, so after some steps free memory is
returned. Settings for glibc's heap in the environment are kept.

The operators that a thread pushes on CPU contexts share its pool of workspaces, and wait until
earlier operators with the same workspace have ended. With MXNet's pool of 4, two contexts often
wait for each other; with 256, rarely. But each workspace grows to the largest size that it was used
for, so a thread's pool is replaced only when gluonpar is first given several contexts there.
Private to MXNet 1.9.1: ``ResourceManagerImpl``, a thread's manager, and ``ResourceTempSpace``, its
pool (src/resource.cc).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
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
_steps = itertools.count(1)

_VARIABLE, _SIZE, _NEW_SIZE = "MXNET_CPU_TEMP_COPY", 4, 256
_SIZE_SET_BY_USER = _VARIABLE in os.environ
_POOL_OFFSET, _POOL_BYTES = 72, 64  # of the pool's address in a manager, and of a pool
# A pool has its context, and the addresses at which the workspaces, and the list of pointers to
# them, begin and end.
_POOL, _ENTRY_BYTES = struct.Struct("=iiQQ8xQQ"), (72, 32)
_this_thread = threading.local()  # .is_wide
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


def return_free(after: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    """Count a step; after the steps 1, 2, 4, 8, ... return free memory to the system.

    A worker of the engine does so when the step has computed the arrays of ``after``.
    """
    number = next(_steps)
    if number & (number - 1) or _SET_BY_USER:
        return
    arrays = [array for arrays in after for array in arrays]
    if arrays and arrays[0].context.device_type == "cpu":
        trim = functools.partial(_libc.malloc_trim, 0)
        engine.push(trim, arrays[0].context, reads=arrays, name="gluonpar.heap")


def widen() -> None:
    """Give this thread's next operators 256 workspaces, unless the user has set another number.

    Raises RuntimeError if the memory of another MXNet has another layout.
    """
    if _SIZE_SET_BY_USER or getattr(_this_thread, "is_wide", False):
        return
    place, cpu = ctypes.c_uint64.from_address(_manager() + _POOL_OFFSET), mx.cpu().device_typeid
    new = _libc.malloc(_POOL_BYTES)  # MXNet frees it at the end
    _make_pool(new, cpu, _NEW_SIZE)  # on cpu(0), whose number is 0
    for pool, size in ((place.value, _SIZE), (new, _NEW_SIZE)):
        kind, number, *ends = _POOL.unpack(ctypes.string_at(pool, _POOL.size))
        got = kind, number, ends[1] - ends[0], ends[3] - ends[2]
        want = cpu, 0, *(size * num_bytes for num_bytes in _ENTRY_BYTES)
        memory.check_layout("pools of workspaces", got, want, f", or set {_VARIABLE}={_NEW_SIZE}")
    place.value, _this_thread.is_wide = new, True  # earlier operators may still use the old pool
