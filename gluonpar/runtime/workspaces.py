"""A thread's pool of workspaces, which the operators that it pushes on CPU contexts share.

An operator waits for its workspace until the operators that drew the same one before have ended.
With MXNet's pool of 4, two contexts soon draw the same and wait for each other; with 256, rarely.
But each workspace grows to the largest size that any operator drew it for, so a pool is replaced
only when gluonpar is first given several contexts on its thread.

Private to MXNet 1.9.1: a thread's ``ResourceManagerImpl``, which is never freed, and its
``ResourceTempSpace`` (src/resource.cc).
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading

import mxnet as mx
from mxnet.base import _LIB

_VARIABLE, _SIZE = "MXNET_CPU_TEMP_COPY", 256
_SET_BY_USER = _VARIABLE in os.environ
if not _SET_BY_USER:
    # So that the list of variables has a place for it, and is not moved later, while MXNet's
    # threads, which have not started yet, read from it.
    os.environ[_VARIABLE] = str(_SIZE)
    del os.environ[_VARIABLE]
# Of a manager: how many workspaces it made, and the address of the pool. Of a pool: its context;
# where the workspaces, and what refers to them, begin and end.
_MANAGER, _POOL = struct.Struct("=8xi60xQ"), struct.Struct("=iiQQ8xQQ")
_POOL_OFFSET, _ENTRY_BYTES = 72, (72, 32)

_this_thread = threading.local()  # .is_wide
_widening = threading.Lock()
_manager = _LIB["_ZN5mxnet15ResourceManager3GetEv"]  # mxnet::ResourceManager::Get()
_manager.restype = ctypes.c_void_p


def widen() -> None:
    """Give this thread a pool of 256 workspaces, unless the user has set another number.

    Operators that have been pushed keep those that they have.
    """
    if _SET_BY_USER or getattr(_this_thread, "is_wide", False):
        return
    managers = [_manager()]  # this thread's, and that of a new thread, which reads the variable
    with _widening:
        os.environ[_VARIABLE] = str(_SIZE)
        thread = threading.Thread(target=lambda: managers.append(_manager()))
        thread.start()
        thread.join()
        del os.environ[_VARIABLE]
    narrow, wide = map(_pool, managers)
    for manager, pool in zip(managers, (wide, narrow)):
        ctypes.c_uint64.from_address(manager + _POOL_OFFSET).value = pool
    _this_thread.is_wide = True


def _pool(manager: int) -> int:
    """Return the address of the manager's pool; RuntimeError if memory is not as expected."""
    size, pool = _MANAGER.unpack(ctypes.string_at(manager, _MANAGER.size))
    kind, number, *ends = _POOL.unpack(ctypes.string_at(pool, _POOL.size))
    found = kind, number, ends[1] - ends[0], ends[3] - ends[2]
    want = mx.cpu().device_typeid, 0, *(size * num_bytes for num_bytes in _ENTRY_BYTES)
    if found != want:
        raise RuntimeError(
            f"gluonpar replaces MXNet 1.9.1's pool of workspaces, and finds {found}, not {want}, "
            f"in {mx.libinfo.find_lib_path()[0]}. Install mxnet==1.9.1, or set {_VARIABLE}={_SIZE}"
        )
    return pool
