"""What the ranks of a job give to the sums of a round of :mod:`gluonpar.batch_norm.device_sums`.

A round has a name that is the same on all ranks: where it begins, and how many began there before.
So has each sum in it: the layer's name, and the fields of its ``SumKey``. A rank sends the values
of its devices to all others, and says at the end of its tasks how many it had and how often they
called each layer. So a sum is complete when each rank has sent values or said that it has no task,
and ranks that differ are named. Everything here is called with ``device_sums.lock`` held.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any, NamedTuple

import numpy as np

from gluonpar import cluster

Name = tuple  # of a round: (where it begins, number); of a sum: see SumKey


class Tasks(NamedTuple):
    """What a rank says at the end of its tasks, or when one has failed."""

    number: int
    calls: dict[str, int]  # of each layer, by its name
    failed: str = ""


class RankRound:
    """One round on this rank, and what has come from the others; without messages, of this only."""

    def __init__(self, place: str, messages: cluster.messages.Messages | None = None) -> None:
        self._messages, self.is_shared = messages, messages is not None
        self.rank = messages.rank if messages else 0
        self._ranks = range(messages.size if messages else 1)
        self._parts: dict[Name, dict[int, np.ndarray]] = {}  # of incomplete sums, by rank
        self._tasks: dict[int, Tasks] = {}  # by rank
        if messages is None:
            return
        _num_begun[place] += 1
        self._name: Name = (place, _num_begun[place])
        _rounds[self._name] = self
        for rank, kind, content in _early.pop(self._name, ()):
            self._receive(rank, kind, content)

    def give(self, name: Name, values: np.ndarray) -> None:
        """Send the values of this rank's devices, (number of devices, n), for a sum."""
        self._send("values", (name, values))

    def say(self, tasks: Tasks) -> None:
        """Send this rank's tasks."""
        if self.is_shared:
            self._send("tasks", tasks)

    def look(self) -> None:
        """Have messages received, because one is waited for."""
        if self._messages:
            self._messages.look()

    def take(self, name: Name) -> dict[int, np.ndarray]:
        """Return the values for a sum by rank, in their order, and keep them no longer."""
        return dict(sorted(self._parts.pop(name, {}).items()))

    def waits_for(self, name: Name) -> list[int]:
        """Return the ranks that have neither sent values for a sum nor said that they have none."""
        arrived = self._parts.get(name, {})
        without = {rank for rank, tasks in self._tasks.items() if not tasks.number}
        return [rank for rank in self._ranks if rank not in arrived and rank not in without]

    def without_word(self) -> list[int]:
        """Return the ranks that have not said what their tasks were."""
        return [rank for rank in self._ranks if rank not in self._tasks]

    def calls(self) -> dict[str, int]:
        """Return how often the ranks' tasks called each layer, when all ranks have said it."""
        return next((tasks.calls for tasks in self._tasks.values() if tasks.number), {})

    def failure(self) -> str:
        """Return why sums will not become complete: a task has failed, or the ranks differ."""
        said = sorted((rank, tasks) for rank, tasks in self._tasks.items() if tasks.number)
        for rank, tasks in said:
            if tasks.failed:
                return f"rank {rank}: {tasks.failed}"
        unlike = [(rank, tasks.calls) for rank, tasks in said if tasks.calls != said[0][1].calls]
        if not unlike:
            return ""
        (first, (_, ours, _)), (other, theirs) = said[0], unlike[0]
        counts = "; ".join(
            f"{layer} was called {ours.get(layer, 0)} times on rank {first} and "
            f"{theirs.get(layer, 0)} times on rank {other}"
            for layer in sorted({*ours, *theirs})
            if ours.get(layer, 0) != theirs.get(layer, 0)
        )
        place, number = self._name
        return (
            f"the ranks differ in call {number} of {place}: {counts}. All ranks must make the same "
            "layers, and call run_tasks equally often with the same ones, also without samples "
            "(shards [])"
        )

    def _send(self, kind: str, content: Any) -> None:
        self._receive(self.rank, kind, content)
        if self._messages:
            self._messages.send((self._name, kind, content))

    def _receive(self, rank: int, kind: str, content: Any) -> None:
        if kind == "tasks":
            self._tasks[rank] = content
            return
        name, values = content
        self._parts.setdefault(name, {})[rank] = values


def receive(rank: int, message: tuple) -> None:
    """Give the message of another rank to its round, which may begin later here."""
    name, kind, content = message
    if name in _rounds:
        _rounds[name]._receive(rank, kind, content)
    elif name[1] > _num_begun[name[0]]:
        _early.setdefault(name, []).append((rank, kind, content))


_num_begun: collections.Counter[str] = collections.Counter()  # rounds, by place
# Those that some operator may still add to; messages for others come too late.
_rounds: weakref.WeakValueDictionary[Name, RankRound] = weakref.WeakValueDictionary()
_early: dict[Name, list[tuple]] = {}  # messages, by the name of a round that has not begun here
