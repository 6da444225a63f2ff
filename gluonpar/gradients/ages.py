"""Ages of gradients, which tell on which ranks they are of the newest batch.

A rank without samples runs no pass: its gradients are of an earlier batch, and must not be added to
other ranks' gradients. An age is two numbers: how many sums there had been when the gradient was
written, and how often it has been written since. Both are the same on all ranks that had samples,
whatever their devices, and smaller on ranks that had none.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from gluonpar import cluster

_num_sums = 0  # how many sums of gradients this rank has begun with the others


class Age:
    """How old one parameter's gradients are."""

    def __init__(self, num_devices: int) -> None:
        self._time, self._num_written = 0, [0] * num_devices

    def count(self, i: int) -> None:
        """Count that the gradient on device ``i`` is written by another recording than before."""
        if self._time != _num_sums:
            self._time, self._num_written = _num_sums, [0] * len(self._num_written)
        self._num_written[i] += 1

    def begin_before_last_sum(self) -> None:
        """Note that the gradients are that sum now."""
        self._time, self._num_written = _num_sums - 1, [0] * len(self._num_written)

    def of(self, counts: bool, is_added: bool, is_lost: bool) -> tuple[int, int]:
        """Return the two numbers of gradients of which one ``counts``; if none does, -1 and 0.

        Gradients that a pass has added to are new. Both numbers are -1 if a gradient has been lost.
        """
        if is_lost or not counts:
            return -1, -int(is_lost)
        return (_num_sums, 0) if is_added else (self._time, max(self._num_written))


def of_ranks(
    ages: Sequence[tuple[int, int]], of: str, **compared: Any
) -> tuple[list[bool], list[bool]]:
    """Begin a sum; return for each parameter if any rank has a gradient, and if this rank's is old.

    All ranks call this before each sum, with the ages of the same parameters and the same name
    ``of``; what else they compare are arguments of :func:`gluonpar.cluster.check_equal_async`. A
    rank that has new gradients of all parameters does not wait. Raises ValueError, possibly later,
    if it is not known which ranks had samples of the last batch.
    """
    global _num_sums
    mine = np.array(ages).reshape(-1, 2)
    gathered = cluster.PendingGather(mine, f"gradients of {of}", _check, **compared)
    _num_sums += 1
    if (mine[:, 0] == _num_sums - 1).all():
        return [True] * len(ages), [False] * len(ages)
    newest = np.max(gathered.wait(), axis=0)[:, 0]
    return (newest >= 0).tolist(), (mine[:, 0] < newest).tolist()


def _check(of_ranks: Sequence[np.ndarray]) -> None:
    sums, written = np.array(of_ranks).transpose(2, 0, 1)
    for rank in np.flatnonzero((written < 0).any(axis=1)):
        raise ValueError(
            f"a pass inside cluster.local() has overwritten gradients of the job on rank {rank}; "
            "call step() before it, or autograd.grad in it, which writes other arrays"
        )
    newest = sums == sums.max(axis=0)
    most = np.where(newest, written, -1).max(axis=0)
    least = np.where(newest, written, np.iinfo("int64").max).min(axis=0)
    if (most != least).any():
        raise ValueError(
            "since the last step, ranks ran backward for different numbers of batches, so which "
            "gradients are of the last batch cannot be told; call step() or allreduce_grads() on "
            "all ranks for each batch, also on ranks without samples"
        )
