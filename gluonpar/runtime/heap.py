"""glibc's heap keeps freed memory; after some steps, free memory is returned to the system.

It does from when gluonpar is first given contexts to compute on: a program that only imports it
needs no more memory than without.

An operator's output that glibc returns to the system when it is freed costs an mmap, page faults
and an munmap in every step. But a program's first steps free much that no later step needs: initial
values, arrays that buckets replaced, memory allocated before a graph was planned.

glibc's settings are left as they are if the environment has any for it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from typing import Sequence

import mxnet as mx

from gluonpar.runtime import engine

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

_libc = ctypes.CDLL(None)
_SET_BY_USER = any(name in os.environ for name in _VARIABLES)
_keeps_freed = False
_steps = itertools.count(1)


def keep_freed() -> None:
    """Have glibc keep what is freed from now on."""
    global _keeps_freed
    if not (_keeps_freed or _SET_BY_USER):
        _libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        _libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        _keeps_freed = True


def return_free(after: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    """Count a step; after the steps 1, 2, 4, 8, ... return free memory to the system.

    That happens on an engine's thread once ``after``, lists of arrays that the step computes, are
    there.
    """
    number = next(_steps)
    if number & (number - 1) or not _keeps_freed:
        return
    arrays = [array for arrays in after for array in arrays]
    if arrays and arrays[0].context.device_type == "cpu":
        engine.push(_trim, arrays[0].context, reads=arrays, name="gluonpar.heap")


def _trim() -> None:
    _libc.malloc_trim(0)
