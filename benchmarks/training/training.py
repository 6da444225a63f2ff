"""What a worker needs of a candidate."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np

if TYPE_CHECKING:
    from benchmarks.training.workloads import Task


class Unavailable(Exception):
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

    def values(self) -> list[list[np.ndarray]]:
        """Return the trained parameters' values, a list per device; empty if not known here."""
        return []

    def memory(self) -> list[dict[str, int]]:
        """Return, per device, bytes of the arrays that stay between steps; empty if not counted.

        Keys: "parameters", "gradients" and "others".
        """
        return []

    def report(self) -> dict[str, Any]:
        """Return what is known after the last step, for JSON."""
        return {"replicas": compare_replicas(self.values()), "memory": self.memory()}

    def barrier(self) -> None:
        """Return when all ranks have called this."""

    def allreduce(self, x: Any) -> Any:
        """Start the sum over all ranks of ``x``, of shape (n,); return the array of the result."""
        raise NotImplementedError


class Rank(Training):
    """One process of several, whose ``own`` training has a shard of ``batch_size`` samples.

    A subclass has :meth:`barrier` and, if it is measured, :meth:`allreduce`.
    """

    def __init__(self, rank: int, size: int, batch_size: int, own: Training | None) -> None:
        self.rank, self.size, self.batch_size, self.own = rank, size, batch_size, own

    def run(self, steps: int) -> None:
        """Take this rank's steps."""
        self.own.run(steps)

    def loss(self) -> float:
        """Return this rank's share of the mean; 0 if it does not train."""
        return self.own.loss() * len(self.own.X) / self.batch_size if self.own else 0.0


def shard(task: Task, rank: int, size: int) -> Task:
    """Return the task with this rank's samples and its one device.

    Raises :class:`Unavailable` on GPUs.
    """
    if any(kind != "cpu" for kind, _ in task.devices):
        raise Unavailable("it is measured on CPU devices only")
    n = len(task.X)
    mine = slice(rank * n // size, (rank + 1) * n // size)
    return dataclasses.replace(task, X=task.X[mine], y=task.y[mine], devices=[("cpu", 0)])


def compare_replicas(replicas: Sequence[Sequence[np.ndarray]]) -> dict[str, int]:
    """Count parameters that differ between devices; ``replicas`` has a list of values per device.

    Keys: "devices", "parameters" of one device, "differing", which have on some device other bits
    than on the first, and "not_finite", which have a NaN or an infinity on some device.

    >>> one, other = np.float32([0, 1]), np.float32([-0.0, 1])
    >>> compare_replicas([[one, one], [one, other]])
    {'devices': 2, 'parameters': 2, 'differing': 1, 'not_finite': 0}
    """
    copies = list(zip(*replicas))  # per parameter, its value on each device
    return {
        "devices": len(replicas),
        "parameters": len(copies),
        "differing": sum(any(_bits(v) != _bits(of[0]) for v in of[1:]) for of in copies),
        "not_finite": sum(not all(np.isfinite(v).all() for v in of) for of in copies),
    }


def _bits(value: np.ndarray) -> tuple:
    return value.dtype, value.shape, value.tobytes()
