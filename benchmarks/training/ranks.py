"""Candidates of several processes: each trains on its shard, and the first leads the others."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Mapping, Sequence

from . import process
from .training import Training
from .workloads import Task


class Rank(Training):
    """One process's training, ``own``, on a ``share`` of the samples.

    ``followers`` are the other ranks' processes, for rank 0 to lead; the others have none.
    """

    def __init__(self, own: Training, share: float, followers: Sequence[process.Child]) -> None:
        self.own, self.share, self.followers = own, share, followers

    def run(self, steps: int) -> None:
        """All ranks' steps: rank 0 is done when the last one is."""
        for follower in self.followers:
            follower.tell({"steps": steps})
        self.own.run(steps)
        for follower in self.followers:
            follower.hear()

    def loss(self) -> float:
        """This rank's part of the mean; rank 0 adds the others'."""
        others = [follower.ask({"report": True}) for follower in self.followers]
        self.other_bytes = sum(other["peak_bytes"] for other in others)
        return self.share * self.own.loss() + sum(other["loss"] for other in others)


def shard(task: Task, rank: int) -> Task:
    """The same task with this rank's samples only."""
    size, n = len(task.devices), len(task.X)
    mine = slice(rank * n // size, (rank + 1) * n // size)
    return dataclasses.replace(task, X=task.X[mine], y=task.y[mine])


def follow(
    module: str, task: Task, options: Mapping[str, Any], env: Mapping[str, str], runtime: str = ""
) -> process.Child:
    """Start another rank: a worker that makes its training with ``options``."""
    arguments = [task.workload, len(task.X), task.devices]
    request = process.request(module, arguments, options, runtime)
    return process.Child(process.command(request), {**os.environ, **env}, leads=False)


def need_cpus(task: Task) -> None:
    """Raise :class:`process.Unable` on GPUs."""
    if any(kind != "cpu" for kind, _ in task.devices):
        raise process.Unable("it is measured on CPU devices only")
