"""How old gradients are, which ranks compare, as on some of them a batch may have no samples.

A rank without samples has no pass, and its gradients are those of a batch before, which must not be
added to those of other ranks. So each counts, for each parameter, the sums before its gradient was
written, and how often it was written since: the same on all ranks that had samples, whatever their
devices, and less on those that had none.
"""

from __future__ import annotations

from typing import Any, Sequence

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


def summands(
    params: Sequence[gluon.Parameter],
    num_processes: int,
    of: str,
    facts: dict[str, Any] | None = None,
) -> tuple[list[list[bool]], list[bool]]:
    """Return per parameter, by device, whether its gradient is added in the sum that comes next.

    And per parameter, whether one is on some rank. All ranks call this before each sum, with the
    same name ``of`` whose gradients these are, and the same ``facts``; gradients older than other
    ranks' are not added. One that has new ones of all parameters does not wait.
    """
    global _num_sums
    of_params = [gradients.tracked[param] for param in params]
    counting = [grads.summands() for grads in of_params]
    on_some_rank = [*map(any, counting)]
    if num_processes > 1 and (params or facts):
        ages = np.array([*map(_age, of_params)]).reshape(-1, 2)
        of_ranks = cluster.PendingGather(ages, f"gradients of {of}", _check, facts)
        _num_sums += 1
        if (ages[:, 0] != _num_sums - 1).any():  # some may be old
            newest = np.max(of_ranks.wait(), axis=0)[:, 0]
            on_some_rank = (newest >= 0).tolist()
            for i in np.flatnonzero(ages[:, 0] < newest):
                counting[i] = [False] * len(counting[i])
    return counting, on_some_rank


def _age(grads: Gradients) -> tuple[int, int]:
    """Return both counts, the first one -1 if no gradient counts. Those added to are of now."""
    if not any(grads.fresh()):
        return -1, 0
    return (_num_sums, 0) if grads.adds() else (grads.time, max(grads.num_written))


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
