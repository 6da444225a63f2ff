"""host: one function on the host sums all devices' memory, cache-sized block by block.

CPU contexts share one memory, so nothing need be sent: NumPy views of the arrays are summed where
they lie. A block of all K arrays stays in a core's cache between being summed and being copied
back, so each array crosses the memory bus twice, in and out: 2 K n bytes, the floor. Large arrays
are shared out over threads.

The function is an operator of MXNet's engine (``engine.push``), so it is as asynchronous as any
other, and runs beside what the devices compute. The order of the additions is that of the list,
starting with the array the sum is written to: always the same bits.
"""

from __future__ import annotations

import functools
from typing import Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from gluonpar.collectives.host import thread_pool
from gluonpar.collectives.registry import register_executor
from gluonpar.runtime import engine, memory

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
    jobs = [(tuple(data), todo) for data, todo in jobs]  # the caller may change its lists by then
    arrays = [array for data, _ in jobs for array in data]
    num_bytes = sum(map(memory.num_bytes, arrays))
    push(functools.partial(_work, jobs, op, accumulate, num_bytes), arrays, num_bytes)


def push(
    function: Callable[[], None],
    arrays: Sequence[mx.nd.NDArray],
    num_bytes: int,
    name: str = "gluonpar.host",
) -> None:
    """Have the engine run ``function``, which works on all ``arrays``, wherever it is soonest."""
    thread_pool.prepare(num_bytes)
    small = num_bytes <= BYTES_AT_ONCE
    ctx = arrays[0].context
    engine.push(function, ctx, writes=arrays, name=name, inline=small, prioritized=not small)


def _work(jobs, op: str, accumulate: str | None, num_bytes: int) -> None:
    tasks = []
    for data, todo in jobs:
        views = memory.views(data)
        for job in todo:
            function = functools.partial(_combine, len(job.sources), op, accumulate)
            chosen = [views[i][job.part] for i in (*job.sources, *job.targets)]
            tasks.append((function, chosen))
    thread_pool.work(tasks, num_bytes)


def _combine(num_sources: int, op: str, accumulate: str | None, *arrays: np.ndarray) -> None:
    """The first array becomes the sum of the first ``num_sources``, added in order; copy it."""
    result, *others = arrays[:num_sources]
    total = result if accumulate is None else result.astype(accumulate)
    for other in others:
        COMBINE[op](total, other, out=total)
    if op == "mean":
        np.divide(total, num_sources, out=total)
    if total is not result:
        np.copyto(result, total, casting="same_kind")
    for target in arrays[num_sources:]:
        np.copyto(target, result)
