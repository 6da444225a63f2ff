"""host: one function on the host sums all devices' memory, cache-sized block by block.

CPU contexts share one memory, so nothing need be sent: NumPy views of the arrays are summed where
they lie. A block of all K arrays is small enough to stay in a core's cache between being summed and
being copied back, so each array crosses the memory bus twice, in and out: 2 K n bytes, the floor.
Large arrays are shared out over threads.

The function is an operator of MXNet's engine (``engine.push``), so it is as asynchronous as any
other. The order of the additions is that of the list, starting with the array the sum is written
to: always the same bits.
"""

from __future__ import annotations

import functools
import multiprocessing.pool
import threading
from collections import deque
from typing import NamedTuple, Sequence

import mxnet as mx
import numpy as np

from gluonpar import engine, memory, threads
from gluonpar.collectives.registry import register_executor

BLOCK_BYTES = 1 << 19  # of one array: smaller ones cost more calls, larger ones leave the cache
BYTES_A_THREAD = 16 << 20  # of all arrays together; less is not worth waking a thread
BYTES_AT_ONCE = 2 << 20  # of all arrays together; so little is summed before a worker would wake

COMBINE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


class Job(NamedTuple):
    """Combine ``part`` of arrays ``sources`` into ``sources[0]``, then copy it to ``targets``."""

    part: slice
    sources: Sequence[int]
    targets: Sequence[int]


@register_executor("host")
def allreduce(
    lists: Sequence[Sequence[mx.nd.NDArray]], op: str = "sum", accumulate: str | None = None
) -> None:
    """The host sums CPU contexts' memory, block by block, on several threads if large."""
    everybody = range(len(lists[0]))
    whole = Job(slice(0, None), everybody, everybody[1:])
    run([(data, [whole]) for data in lists], op, accumulate)


def run(
    jobs: Sequence[tuple[Sequence[mx.nd.NDArray], Sequence[Job]]],
    op: str = "sum",
    accumulate: str | None = None,
) -> None:
    """Push one operator that does all ``jobs``, each a list of arrays and what to do with it."""
    arrays = [array for data, _ in jobs for array in data]
    num_bytes = sum(len(data) * memory.num_bytes(data[0]) for data, _ in jobs)
    if num_bytes >= BYTES_A_THREAD:
        _pool()  # made here, because a process that is ending can start no more threads
    engine.push(
        functools.partial(_work, jobs, op, accumulate, num_bytes),
        arrays[0].context,
        writes=arrays,
        name="gluonpar.host",
        at_once=num_bytes <= BYTES_AT_ONCE,
    )


def _work(jobs, op: str, accumulate: str | None, num_bytes: int) -> None:
    """All jobs, on this thread and, if they are large, on some of the pool's."""
    work = []
    for data, todo in jobs:
        views = [memory.view(array) for array in data]
        for job in todo:
            sources = [views[i][job.part] for i in job.sources]
            work.append((sources, [views[i][job.part] for i in job.targets]))
    blocks = _blocks(work)
    num_threads = min(threads.cores(), 1 + num_bytes // BYTES_A_THREAD)
    arguments = (blocks, op, accumulate)
    helpers = [_pool().apply_async(_help, arguments) for _ in range(1, num_threads)]
    errors = [_help(*arguments), *(helper.get() for helper in helpers)]
    for error in errors:  # only now: no thread may touch the arrays when this function has ended
        if error is not None:
            raise error


def _blocks(work) -> deque:
    """The arrays cut into blocks. Threads take one at a time, so one that starts late does less."""
    blocks = deque()
    for sources, targets in work:
        step = BLOCK_BYTES // sources[0].itemsize
        for start in range(0, sources[0].size, step):
            block = slice(start, start + step)
            blocks.append(([s[block] for s in sources], [t[block] for t in targets]))
    return blocks


def _sum_blocks(blocks: deque, op: str, accumulate: str | None) -> None:
    with np.errstate(all="ignore"):  # as MXNet's operators: what overflows is inf, and no warning
        while blocks:
            try:
                sources, targets = blocks.popleft()
            except IndexError:  # another thread took the last one
                return
            _combine(sources[0], sources[1:], op, accumulate)
            for target in targets:
                np.copyto(target, sources[0])


def _help(*arguments) -> BaseException | None:
    """The error, if any: a thread of the pool would die of a KeyboardInterrupt and never answer."""
    try:
        _sum_blocks(*arguments)
    except BaseException as error:
        arguments[0].clear()  # the others need not go on
        return error
    return None


def _combine(result: np.ndarray, others: list, op: str, accumulate: str | None) -> None:
    """``result`` becomes the sum of itself and the others, added in order."""
    total = result if accumulate is None else result.astype(accumulate)
    for other in others:
        COMBINE[op](total, other, out=total)
    if op == "mean":
        np.divide(total, 1 + len(others), out=total)
    if total is not result:
        np.copyto(result, total, casting="same_kind")


@functools.lru_cache(None)
def _make_pool() -> multiprocessing.pool.ThreadPool:
    pool = multiprocessing.pool.ThreadPool(max(1, threads.cores() - 1))
    engine.at_exit(pool.terminate)
    return pool


_pool_lock = threading.Lock()


def _pool() -> multiprocessing.pool.ThreadPool:
    with _pool_lock:
        return _make_pool()
