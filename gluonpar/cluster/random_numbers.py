"""Random operators, such as dropout, that draw other numbers on each rank."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx

from gluonpar.cluster.process_collectives import PendingGather
from gluonpar.cluster.world import rank, size
from gluonpar.runtime import device_threads

_numbers: list[tuple[int, int]] = []  # by rank, once they are known: device_threads.number_from


def draw_apart(ctx: Sequence[mx.Context] = ()) -> None:
    """From now on draw as this rank's devices, which are ``ctx``, among those of all ranks.

    All ranks call this when their parameters have become alike: before it, ranks with one seed draw
    the same initial values. Without ``ctx`` it has no effect if the devices are known, and counts
    one per rank otherwise. Waits for all ranks.
    """
    if size() == 1 or (not ctx and _numbers):
        return
    lowest = min((each.device_id for each in ctx), default=0)
    ranks = PendingGather((len(ctx) or 1, lowest), "numbers of devices").wait()
    before = _numbers[rank()] if _numbers else (0, 0)
    firsts = [sum(count for count, _ in ranks[:i]) for i in range(len(ranks))]
    _numbers[:] = [(first, first - lowest) for first, (_, lowest) in zip(firsts, ranks)]
    if _numbers[rank()] != before:
        device_threads.number_from(lambda: _numbers[rank()])  # those of rank 0 inside local()
