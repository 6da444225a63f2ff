"""A process that has joined the others of its job: what every candidate's ranks can do."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.training.ranks import shard
from benchmarks.training.training import Training
from benchmarks.training.workloads import Task, task

WORKLOAD = "lenet"


class Joined:
    """A rank: its ``training`` on its share of the batch, if it trains; its sums with the others.

    A subclass gives :meth:`barrier` and, if it is measured, :meth:`allreduce`.
    """

    training: Training | None = None

    def __init__(self, rank: int, size: int, batch_size: int) -> None:
        self.rank, self.size, self.batch_size = rank, size, batch_size
        self.whole = task(WORKLOAD, batch_size, [("cpu", i) for i in range(size)])

    @property
    def own(self) -> Task:
        """This rank's samples, for the one device that it has."""
        return dataclasses.replace(shard(self.whole, self.rank), devices=[("cpu", 0)])

    def loss(self) -> float:
        """This rank's part of the mean loss over the whole batch; 0 if it does not train."""
        if self.training is None:
            return 0.0
        return self.training.loss() * len(self.training.X) / self.batch_size

    def barrier(self) -> None:
        """Return when all ranks are here."""
        raise NotImplementedError

    def allreduce(self, n: int, x: Any) -> Any:
        """Start the sum over all ranks of ``x``, of shape (n,); the array that will hold it."""
        raise NotImplementedError
