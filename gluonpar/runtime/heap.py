"""glibc's heap keeps freed memory; after some steps, free memory is returned to the system.

An operator's output that glibc returned when it is freed would cost an mmap, page faults and an
munmap in every step. But a program's first steps free much that no later step needs, such as
initial values and arrays that buckets replaced.

This starts when gluonpar is first given contexts to compute on. If the environment has settings for
glibc's heap, they are left as they are.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from typing import Sequence

import mxnet as mx

from gluonpar.runtime import engine

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_VARIABLES = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
_SET_BY_USER = not _VARIABLES.isdisjoint(os.environ)
_libc = ctypes.CDLL(None)
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

    An engine's thread does so once the arrays of ``after``, which the step computes, are there.
    """
    number = next(_steps)
    if number & (number - 1) or not _keeps_freed:
        return
    arrays = [array for arrays in after for array in arrays]
    if arrays and arrays[0].context.device_type == "cpu":
        trim = functools.partial(_libc.malloc_trim, 0)
        engine.push(trim, arrays[0].context, reads=arrays, name="gluonpar.heap")
