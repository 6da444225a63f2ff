"""Apply functions to arrays in the host's memory, in cache-sized blocks shared by several threads.

A block of all arrays of a task is small enough to stay in a core's cache from being read to being
written, so each array crosses the memory bus once in and once out, whatever the function does.
"""

from __future__ import annotations

import contextvars
import functools
import multiprocessing.pool
import os
from typing import Callable, Iterable, Sequence

import mxnet as mx
import numpy as np

from gluonpar.runtime import engine, memory, threads

BLOCK_BYTES = 1 << 19  # of one array: smaller blocks cost more calls, larger ones leave the cache
BYTES_INLINE = 2 << 20  # of all arrays: up to this, the work takes less than waking a worker
BYTES_PER_THREAD = 16 << 20  # of all arrays: with fewer bytes waking a thread does not pay


def push(
    function: Callable[[], None], arrays: Sequence[mx.nd.NDArray], num_bytes: int, name: str
) -> None:
    """Push ``function``, which reads and writes ``arrays``, on the thread that can start first.

    It may call :func:`run` on ``num_bytes``; ``name`` is what MXNet's profiler shows.
    """
    prepare(arrays, num_bytes, name)(function)


def prepare(
    arrays: Sequence[mx.nd.NDArray], num_bytes: int, name: str
) -> Callable[[Callable[[], None]], None]:
    """Return what does :func:`push` with a function; it does not keep the arrays alive."""
    small, ctx = num_bytes <= BYTES_INLINE, memory.context(arrays[0])
    how = {"inline": small, "prioritized": not small}
    prepared = engine.prepare(ctx, writes=arrays, name=name, **how)
    if num_bytes < BYTES_PER_THREAD:
        return prepared

    def push_function(function: Callable[[], None]) -> None:
        pool()  # now, since an exiting process cannot start threads
        prepared(function)

    return push_function


def run(
    tasks: Sequence[tuple[Callable[..., None], Sequence[np.ndarray]]],
    num_bytes: int,
    max_threads: int | None = None,
) -> None:
    """Call each task's function on all blocks of its arrays; return when everything is done.

    The arrays of a task are flat and of equal length; all are cut in the same places, and the
    function is given one block of each, in no particular order and on any thread. ``num_bytes`` is
    the total of all arrays; ``max_threads`` counts the calling thread, too (default: the number of
    processors). An exception ends the work, and is raised when no thread uses the arrays any more.
    """
    blocks = []
    for function, arrays in tasks:
        size, step = arrays[0].size, BLOCK_BYTES // arrays[0].itemsize
        if size <= step:
            blocks.append((function, arrays))
            continue
        for start in range(0, size, step):
            blocks.append((function, [array[start : start + step] for array in arrays]))
    num_threads = min(1 + num_bytes // BYTES_PER_THREAD, len(blocks))
    if num_threads <= 1:
        return _call_all(blocks)
    remaining = iter(blocks)  # threads take one at a time: a late one takes fewer

    def work() -> BaseException | None:  # not raised, as raising some would end the pool's thread
        try:
            _call_all(remaining)
        except BaseException as error:
            blocks.clear()  # so that the other threads stop
            return error

    num_threads = min(num_threads, max_threads or threads.cores())
    results = [pool().apply_async(work) for _ in range(1, num_threads)]
    for error in [work(), *(result.get() for result in results)]:
        if error is not None:
            raise error


def _call_each(blocks: Iterable[tuple[Callable[..., None], Sequence[np.ndarray]]]) -> None:
    for function, arrays in blocks:
        function(*arrays)


# Call blocks' functions without warnings, as MXNet's operators: overflow gives inf. np.errstate
# would take microseconds.
if hasattr(np, "geterrobj"):  # NumPy 1, which has these settings per thread

    def _call_all(blocks: Iterable) -> None:
        settings = np.geterrobj()
        np.seterrobj([settings[0], 0, None])
        try:
            _call_each(blocks)
        finally:
            np.seterrobj(settings)

else:  # in a context variable
    _SILENT = contextvars.Context()
    _SILENT.run(np.seterr, all="ignore")

    def _call_all(blocks: Iterable) -> None:
        _SILENT.copy().run(_call_each, blocks)


class _Threads(multiprocessing.pool.ThreadPool):
    """A pool whose semaphores are the process's own.

    Since Python 3.14 those of ThreadPool are shared with other processes: one more process is
    started to remove them, which a fork of this process cannot use.
    """

    def __init__(self, num_threads: int):
        fork = multiprocessing.get_context("fork")
        multiprocessing.pool.Pool.__init__(self, num_threads, context=fork)


@functools.lru_cache(None)
def pool() -> multiprocessing.pool.ThreadPool:
    """Return this process's pool, with one thread less than there are processors."""
    made = _Threads(max(1, threads.cores() - 1))
    engine.at_exit(made.terminate)
    return made


def _after_fork() -> None:
    """Forget the parent's pool, whose threads this process does not have."""
    if pool.cache_info().currsize:
        # Or its destructor would write to a pipe that is the parent's, too.
        pool()._state = multiprocessing.pool.TERMINATE
    pool.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
