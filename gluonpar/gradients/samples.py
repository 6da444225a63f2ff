"""Counts the samples of the first step of a job on each rank, which rank 0 prints once.

If mpirun starts a program for one process, every rank trains on all samples, and divides by the
number of samples of one rank. Nothing else shows that. The number of samples is the first dimension
of what backward is called for.
"""

from __future__ import annotations

import functools
import sys
from typing import Iterable, Sequence

from mxnet.base import NDArrayHandle

from gluonpar import cluster
from gluonpar.gradients.records import Gradients
from gluonpar.runtime import memory, tape

_is_counting = False  # from the first Trainer of the job on, until its first step
_is_told = False


def begin_to_count() -> None:
    """Count the samples of passes from now on, if the job has had no step."""
    global _is_counting
    _is_counting = not _is_told


def count(heads: Iterable[int], written: Sequence[tape.Written]) -> None:
    """Note how many samples a pass has, given the handles of its heads and what it writes."""
    if not _is_counting:
        return
    by_device: dict[tuple[int, int], int] = {}
    for head in heads:
        array = memory.alias(NDArrayHandle(head))
        ctx, num = memory.context(array), array.shape[0] if array.ndim else 1
        device = ctx.device_typeid, ctx.device_id
        by_device[device] = max(by_device.get(device, 0), num)
    for _, record, i in written:
        if isinstance(record, Gradients):
            record.num_samples += by_device.get(record.devices[i], 0)


def tell(of_params: Iterable[Gradients], batch_size: float) -> None:
    """In a job's first step, print on rank 0 what a step divides by. All ranks call this."""
    global _is_counting, _is_told
    if not _is_told and cluster.size() > 1:
        _is_counting, _is_told = False, True
        num_samples = max(grads.num_samples for grads in of_params)
        how = "numbers of samples", functools.partial(_print, batch_size)
        cluster.PendingGather(num_samples, *how)


def _print(batch_size: float, of_ranks: Sequence[int]) -> None:
    if not cluster.is_main():
        return
    divides = f"divides the sum of the gradients of all ranks by batch_size={batch_size:.12g}"
    line = f"gluonpar: the first step {divides}"
    if max(of_ranks) > 1:  # otherwise losses may be means
        if len({*of_ranks}) == 1:
            nums = f"{of_ranks[0]} on each of {len(of_ranks)} ranks"
        else:
            nums = ", ".join(f"{num} on rank {rank}" for rank, num in enumerate(of_ranks))
        line += f"; its losses had {nums}"
        if sum(of_ranks) != batch_size:
            line += (
                f". If each rank has samples of its own, that should be {sum(of_ranks)}; if all "
                "have the same, give each its part (gluonpar.DataLoader, docs/cluster.md)"
            )
    print(line, file=sys.stderr, flush=True)
