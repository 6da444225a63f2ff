"""The memory of operators on CPU contexts: glibc's heap, and each thread's pool of workspaces.

From the first contexts that gluonpar is given, the heap keeps freed memory: returning an operator's
output to the system would cost an mmap, page faults and an munmap in every step. The first steps
free much that later steps do not need, such as initial values, so after some steps free memory is
returned. Settings for glibc's heap in the environment are kept.

The operators that a thread pushes on CPU contexts share its pool of workspaces, and wait until
earlier operators with the same workspace have ended. With MXNet's pool of 4, two contexts often
wait for each other; with 256, rarely. But each workspace grows to the largest size that it was used
for, so a thread's pool is replaced only when gluonpar is first given several contexts there: MXNet
makes the pool that replaces it, for a new thread that ends at once.

Private to MXNet 1.9.1: a thread's ``ResourceManagerImpl``, which is never freed, and its
``ResourceTempSpace`` (src/resource.cc).
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

_VARIABLE, _SIZE = "MXNET_CPU_TEMP_COPY", 256
_SIZE_SET_BY_USER = _VARIABLE in os.environ
# The variable is in the environment from the import on, under a name with another first letter. So
# it can be set and unset by that letter alone, while MXNet's threads read the list of variables.
_MEANT, _HIDDEN = b"Mm"
_libc.strdup.restype, _libc.putenv.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
_place = _libc.strdup(f"m{_VARIABLE[1:]}={_SIZE}".encode())  # never freed, as putenv needs it
_letter = ctypes.c_uint8.from_address(_place)
_libc.putenv(_place)
# A manager has the number of its workspaces and its pool's address. A pool has its context, and the
# addresses at which the workspaces, and the list of pointers to them, begin and end.
_MANAGER, _POOL = struct.Struct("=8xi60xQ"), struct.Struct("=iiQQ8xQQ")
_POOL_OFFSET, _ENTRY_BYTES = 72, (72, 32)

_this_thread = threading.local()  # .is_wide
_widening = engine.lock()
_manager = _LIB["_ZN5mxnet15ResourceManager3GetEv"]  # mxnet::ResourceManager::Get()
_manager.restype = ctypes.c_void_p


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
    """Give this thread's next operators 256 workspaces, unless the user has set another number."""
    if _SIZE_SET_BY_USER or getattr(_this_thread, "is_wide", False):
        return
    managers = [_manager()]  # this thread's, and a new thread's, which reads the variable
    with _widening:
        _letter.value = _MEANT
        thread = threading.Thread(target=lambda: managers.append(_manager()))
        thread.start()
        thread.join()
        _letter.value = _HIDDEN
    narrow, wide = map(_pool, managers)
    for manager, pool in zip(managers, (wide, narrow)):
        ctypes.c_uint64.from_address(manager + _POOL_OFFSET).value = pool
    _this_thread.is_wide = True


def _pool(manager: int) -> int:
    """Return the address of the manager's pool. Raises RuntimeError if it is another MXNet's."""
    size, pool = _MANAGER.unpack(ctypes.string_at(manager, _MANAGER.size))
    kind, number, *ends = _POOL.unpack(ctypes.string_at(pool, _POOL.size))
    got = kind, number, ends[1] - ends[0], ends[3] - ends[2]
    want = mx.cpu().device_typeid, 0, *(size * num_bytes for num_bytes in _ENTRY_BYTES)
    memory.check_layout("pools of workspaces", got, want, f", or set {_VARIABLE}={_SIZE}")
    return pool
