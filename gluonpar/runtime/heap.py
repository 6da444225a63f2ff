"""glibc's heap: large arrays are kept in it, and after some steps what is free is returned.

An operator's output that glibc returns to the system when it is freed costs an mmap, page faults
and an munmap in every step. But a program's first steps free much that no later step needs: initial
values, arrays in whose place buckets came, what was allocated before a graph was planned.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    import mxnet as mx

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

_libc = ctypes.CDLL(None)
_keeps = False
_steps = itertools.count(1)


def keep_large_arrays() -> None:
    """Have glibc keep the memory of freed arrays, unless the environment has settings for it."""
    global _keeps
    mallopt = getattr(_libc, "mallopt", None)  # other C libraries may lack it
    if mallopt is not None and not any(name in os.environ for name in _MALLOC_VARIABLES):
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        _keeps = True


def return_free(after: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    """Count a step; after the steps 1, 2, 4, 8, ... return free memory to the system.

    That happens on an engine's thread once ``after``, lists of arrays that the step computes, are
    there. Nothing is done if :func:`keep_large_arrays` left glibc's settings as they were.
    """
    number = next(_steps)
    if number & (number - 1) or not _keeps:
        return
    from gluonpar.runtime import engine  # here, because MXNet is imported later than this module

    arrays = [array for arrays in after for array in arrays]
    if arrays and arrays[0].context.device_type == "cpu":
        engine.push(_trim, arrays[0].context, reads=arrays, name="gluonpar.heap")


def _trim() -> None:
    _libc.malloc_trim(0)
