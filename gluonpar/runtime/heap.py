"""glibc's heap: after some steps, the memory that is free in it is returned to the system.

An operator's output that glibc returns to the system when it is freed costs an mmap, page faults
and an munmap in every step. But a program's first steps free much that no later step needs: initial
values, arrays in whose place buckets came, what was allocated before a graph was planned.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Sequence

import mxnet as mx

from gluonpar.install import startup
from gluonpar.runtime import engine

_libc = ctypes.CDLL(None)
_steps = itertools.count(1)


def return_free(after: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    """Count a step; after the steps 1, 2, 4, 8, ... return free memory to the system.

    That happens on an engine's thread once ``after``, lists of arrays that the step computes, are
    there. Nothing is done if start-up left glibc's settings as they were.
    """
    number = next(_steps)
    if number & (number - 1) or not startup.keeps_freed_memory:
        return
    arrays = [array for arrays in after for array in arrays]
    if arrays and arrays[0].context.device_type == "cpu":
        engine.push(_trim, arrays[0].context, reads=arrays, name="gluonpar.heap")


def _trim() -> None:
    _libc.malloc_trim(0)
