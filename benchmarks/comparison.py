"""The jobs of all candidates, which take turns, and the loss that they must agree on."""

from __future__ import annotations

import signal
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np

from benchmarks.jobs import Failed, Job
from benchmarks.training.training import Unavailable
from gluonpar.diagnostics.benchmark import harness

TOLERANCE = 1e-3  # of the mean loss after all steps


class Comparison:
    """The running jobs by name; a context manager that ends them all.

    ``left_out`` and ``failed`` map candidates to the reason why they do not take part, or no longer
    do. With ``stop`` all ranks of a job are stopped (SIGSTOP) while others have their turn.
    """

    def __init__(self, stop: bool = False) -> None:
        self.jobs: dict[str, Job] = {}
        self.left_out: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self._stop = stop

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: Any) -> None:
        while self.jobs:
            self.jobs.popitem()[1].close()

    def start(self, name: str, make: Callable[[], Job]) -> None:
        """Make a candidate's job."""
        try:
            self.jobs[name] = make()
        except Unavailable as reason:
            self.left_out[name] = str(reason)
        except Failed as how:
            self.failed[name] = str(how)
        else:
            self._signal(name, signal.SIGSTOP)

    def ask(self, name: str, **message: Any) -> list[dict[str, Any]]:
        """Return the ranks' answers; none, and the job is ended, if it has failed."""
        if name not in self.jobs:
            return []
        self._signal(name, signal.SIGCONT)
        try:
            return self.jobs[name].ask(message)
        except Failed as how:
            self.failed[name] = str(how)
            self.jobs.pop(name).close()
            return []
        finally:
            self._signal(name, signal.SIGSTOP)

    def turns(
        self, rounds: int, warmup: int = 0, progress: harness.Progress = iter
    ) -> Iterator[tuple[str, bool]]:
        """Yield the candidates' names in turns, as :func:`harness.turns` does."""
        return harness.turns(list(self.jobs), rounds, warmup, progress)

    def missing(self) -> list[str]:
        """Return a line for each candidate that is not, or no longer, there."""
        left_out = [f"left out: {name}: {reason}" for name, reason in self.left_out.items()]
        return left_out + [f"failed: {name}: {how}" for name, how in self.failed.items()]

    def _signal(self, name: str, number: int) -> None:
        if self._stop and name in self.jobs:
            self.jobs[name].signal(number)


def expected_loss(losses: Mapping[str, float], references: Sequence[str] = ()) -> float:
    """Return the loss of the first reference among ``losses``, else their median."""
    for name in references:
        if name in losses:
            return losses[name]
    return float(np.median(list(losses.values()))) if losses else float("nan")


def is_wrong(deviation: float | None) -> bool:
    """Return whether a loss is too far from the expected one, or not a number."""
    return deviation is not None and not abs(deviation) <= TOLERANCE
