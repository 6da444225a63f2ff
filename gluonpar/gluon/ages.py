"""How old gradients are, which ranks compare: on some of them a batch may have no samples.

Which gradients of a rank count is told by its own passes (:mod:`gluonpar.gluon.batches`). A rank
without samples has no pass, and its gradients are those of a batch before, which must not be added
to those of other ranks. So each rank counts, for each parameter, the sums before its gradient was
written, and how often it was written since then: the same on all ranks that had samples, whatever
their devices, and less on those that had none.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np
from mxnet import gluon

from gluonpar import cluster
from gluonpar.gluon import gradients
from gluonpar.gluon.gradients import Gradients

_num_sums = 0  # of gradients, over devices and ranks


def begin(grads: Gradients) -> None:
    """Note that gradients are now those of the last sum."""
    grads.time, grads.num_written = _num_sums - 1, [0] * len(grads.values)


def count(grads: Gradients, device: int) -> None:
    """Count that the gradient on a device is written by another recording than before."""
    if grads.time != _num_sums:
        grads.time, grads.num_written = _num_sums, [0] * len(grads.values)
    grads.num_written[device] += 1


def without_older(
    params: Sequence[gluon.Parameter], counting: Sequence[list[bool]], num_processes: int
) -> tuple[list[list[bool]], list[bool]]:
    """Return ``counting``, without gradients that are older than those of other ranks.

    ``counting`` is per parameter, by device, whether its gradient is added in the sum that comes
    next. And return, per parameter, whether one is on some rank. All ranks call this before each
    sum. One that has new gradients of all parameters does not wait for the others.
    """
    global _num_sums
    on_some_rank = [*map(any, counting)]
    if num_processes == 1 or not params:
        return [*counting], on_some_rank
    ages = np.array([_age(gradients.of(param)) for param in params])
    of_ranks = cluster.PendingGather(ages, "ages of gradients", _check)
    _num_sums += 1
    if (ages[:, 0] == _num_sums - 1).all():
        return [*counting], on_some_rank
    newest = np.max(of_ranks.wait(), axis=0)[:, 0]
    old = ages[:, 0] < newest
    counting = [[False] * len(each) if is_old else each for each, is_old in zip(counting, old)]
    return counting, (newest >= 0).tolist()


def _age(grads: Gradients) -> tuple[int, int]:
    """After how many sums the gradient was written, and how often since then; -1 if none counts.

    Gradients that passes add to are of now.
    """
    if not any(grads.flags()):
        return -1, 0
    return (_num_sums, 0) if grads.adds else (grads.time, max(grads.num_written))


def _check(of_ranks: Sequence[np.ndarray]) -> None:
    """Raise ValueError if it cannot be told which ranks had samples of the last batch."""
    sums, written = np.array(of_ranks).transpose(2, 0, 1)
    newest = sums == sums.max(axis=0)
    most = np.where(newest, written, -1).max(axis=0)
    least = np.where(newest, written, np.iinfo("int64").max).min(axis=0)
    if (most != least).any():
        raise ValueError(
            "since the last step, ranks ran backward for different numbers of batches, so which "
            "gradients are of the last batch cannot be told; call step() or allreduce_grads() on "
            "all ranks for each batch, also on ranks without samples"
        )
