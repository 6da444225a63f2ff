"""Work on the host's memory: arrays cut into cache-sized blocks that threads share out.

A block of all arrays together is small enough to stay in a core's cache from being read to being
written back, so whatever is done with it, each array crosses the memory bus once in and once out.
"""

from __future__ import annotations

import functools
import multiprocessing.pool
import threading
from collections import deque
from typing import Callable, Sequence

import numpy as np

from gluonpar.runtime import engine, threads

BLOCK_BYTES = 1 << 19  # of one array: smaller ones cost more calls, larger ones leave the cache
BYTES_A_THREAD = 16 << 20  # of all arrays together; less is not worth waking a thread


def prepare(num_bytes: int) -> None:
    """Call it before :func:`work` on so many bytes is handed to MXNet's engine.

    A process that is ending, and waits for the engine, can start no more threads.
    """
    if num_bytes >= BYTES_A_THREAD:
        _pool()


def work(
    tasks: Sequence[tuple[Callable[..., None], Sequence[np.ndarray]]],
    num_bytes: int,
    most_threads: int | None = None,
) -> None:
    """Call each task's function on all blocks of its arrays; return when all is done.

    A task's arrays are flat and equally long; they are cut alike, and the function gets one block
    of each. The order of the blocks, and the thread that does one, are left open. ``num_bytes`` are
    those of all arrays; ``most_threads`` counts the calling one (default: as many as there are
    processors). An exception of any function ends the work, and is raised when no thread is at the
    arrays.
    """
    blocks = _blocks(tasks)
    most = threads.cores() if most_threads is None else most_threads
    num_threads = min(most, 1 + num_bytes // BYTES_A_THREAD, len(blocks))
    helpers = [_pool().apply_async(_help, (blocks,)) for _ in range(1, num_threads)]
    errors = [_help(blocks), *(helper.get() for helper in helpers)]
    for error in errors:
        if error is not None:
            raise error


def _blocks(tasks) -> deque:
    """Threads take one at a time, so one that starts late does less."""
    blocks = deque()
    for function, arrays in tasks:
        step = BLOCK_BYTES // arrays[0].itemsize
        for start in range(0, arrays[0].size, step):
            blocks.append((function, [array[start : start + step] for array in arrays]))
    return blocks


def _help(blocks: deque) -> BaseException | None:
    """The error, if any: a thread of the pool would die of a KeyboardInterrupt and never answer."""
    try:
        with np.errstate(all="ignore"):  # as MXNet's operators: inf for what overflows, no warning
            _do(blocks)
    except BaseException as error:
        blocks.clear()  # the others need not go on
        return error
    return None


def _do(blocks: deque) -> None:
    while blocks:
        try:
            function, arrays = blocks.popleft()
        except IndexError:  # another thread took the last one
            return
        function(*arrays)


@functools.lru_cache(None)
def _make_pool() -> multiprocessing.pool.ThreadPool:
    pool = multiprocessing.pool.ThreadPool(max(1, threads.cores() - 1))
    engine.at_exit(pool.terminate)
    return pool


_pool_lock = threading.Lock()


def _pool() -> multiprocessing.pool.ThreadPool:
    with _pool_lock:
        return _make_pool()
