"""What a worker needs of a candidate."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.training.workloads import Task


class UnavailableError(Exception):
    """A candidate cannot run here; why. Not a failure."""


class Training:
    """Training under way, on the whole batch, or on one rank's shard of it."""

    rank, size = 0, 1
    version = ""

    def step(self) -> None:
        """Take one step, without waiting for its end."""
        raise NotImplementedError

    def wait(self) -> None:
        """Return when everything that the steps started has finished."""
        raise NotImplementedError

    def loss(self) -> float:
        """Return the mean loss over the batch, each device's shard with its present parameters.

        Batch normalisation uses the shard's statistics, as in a step. Nothing is changed. A rank
        returns its share of the mean.
        """
        raise NotImplementedError

    def run(self, steps: int) -> None:
        """Take ``steps`` steps and wait."""
        for _ in range(steps):
            self.step()
        self.wait()

    def memory(self) -> list[dict[str, int]]:
        """Return, per device, bytes of the arrays that stay between steps; empty if not counted.

        Keys: "parameters", "gradients" and "others".
        """
        return []

    def barrier(self) -> None:
        """Return when all ranks have called this."""

    def allreduce(self, x: Any) -> Any:
        """Start the sum over all ranks of ``x``, of shape (n,); return the array of the result."""
        raise NotImplementedError


class Rank(Training):
    """One process of several, whose ``training`` has a shard of ``batch_size`` samples.

    A subclass has :meth:`barrier` and, if it is measured, :meth:`allreduce`.
    """

    def __init__(self, rank: int, size: int, batch_size: int, training: Training | None) -> None:
        self.rank, self.size, self.batch_size, self.training = rank, size, batch_size, training

    def run(self, steps: int) -> None:
        """Take this rank's steps."""
        self.training.run(steps)

    def loss(self) -> float:
        """Return this rank's share of the mean; 0 if it does not train."""
        if self.training is None:
            return 0.0
        return self.training.loss() * len(self.training.X) / self.batch_size


def shard(task: Task, rank: int, size: int) -> Task:
    """Return the task with this rank's samples and its one device.

    Raises :class:`UnavailableError` on GPUs.
    """
    if any(kind != "cpu" for kind, _ in task.devices):
        raise UnavailableError("it is measured on CPU devices only")
    n = len(task.X)
    mine = slice(rank * n // size, (rank + 1) * n // size)
    return dataclasses.replace(task, X=task.X[mine], y=task.y[mine], devices=[("cpu", 0)])
