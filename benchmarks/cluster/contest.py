"""Who has the machine when: all candidates' jobs live, one is asked, the others stand still."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from benchmarks.cluster.gate import Lost
from benchmarks.cluster.jobs import CANDIDATES, Asked, Job, Unable
from gluonpar.diagnostics.benchmark import measure

TOLERANCE = 1e-3  # of the mean loss after all steps
STEPS = "steps"


@dataclass
class Row:
    """One candidate on so many processes.

    ``seconds[n]`` are the slowest rank's of the all-reduce of n float32, ``seconds["steps"]`` those
    of a training step; ``lo_bytes`` what the loopback network carried meanwhile, a process.
    """

    name: str
    processes: int
    batch_size: int
    seconds: dict[Any, list[float]] = field(default_factory=dict)
    lo_bytes: dict[Any, list[float]] = field(default_factory=dict)
    wrong_sums: int = 0
    first_loss: float = 0.0
    last_loss: float | None = None
    deviation: float | None = None

    @property
    def wrong(self) -> bool:
        """Whether a sum was wrong, or the loss is another than the others', or no number."""
        other = self.deviation is not None and not abs(self.deviation) <= TOLERANCE
        return bool(self.wrong_sums) or other

    def median(self, what: Any) -> float:
        """Seconds of a sum of so many elements, or of a step."""
        return measure.Samples(tuple(self.seconds[what])).median

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with all samples."""
        return {**vars(self), "wrong": self.wrong}


class Contest:
    """The jobs of some candidates; a context manager that ends them all.

    ``left_out`` and ``failed`` map candidates to why they are not, or no longer, among them.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.left_out: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self._jobs: dict[str, Job] = {}
        self._rows: dict[str, Row] = {}

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *_: Any) -> None:
        for job in self._jobs.values():
            job.close()

    def start(self, name: str) -> None:
        """Start a candidate's job, and wait until its ranks have come."""
        try:
            self._jobs[name] = job = Job(name, self.asked)
        except Unable as reason:
            self.left_out[name] = str(reason)
        except Lost as how:
            self.failed[name] = str(how)
        else:
            row = Row(name, self.asked.processes, self.asked.batch_size, first_loss=job.loss)
            self._rows[name] = row
            job.gate.signal(signal.SIGSTOP)

    def measure(
        self,
        sizes: Sequence[int],
        steps: int,
        rounds: int,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
        warmup: int = 2,
    ) -> None:
        """A sample of each candidate in each round, in changing order, after ``warmup`` rounds."""
        names = list(self._jobs)
        if not names:
            return
        for round_ in progress(range(warmup + rounds)):
            for i in measure.order(len(names), round_):
                self._turn(names[i], sizes, steps, counts=round_ >= warmup)

    def rows(self) -> list[Row]:
        """What came of it, for those that are still there."""
        for name in list(self._jobs):
            answers = self._ask(name, {"loss": None}) if CANDIDATES[name].trains else None
            if answers is not None:
                self._rows[name].last_loss = sum(answer["loss"] for answer in answers)
        rows = [self._rows[name] for name in self._jobs]
        agreeing = [r for r in rows if CANDIDATES[r.name].exchanges and r.last_loss is not None]
        for row in agreeing:
            row.deviation = row.last_loss - float(np.median([r.last_loss for r in agreeing]))
        return rows

    def _turn(self, name: str, sizes: Sequence[int], steps: int, counts: bool) -> None:
        candidate = CANDIDATES[name]
        asked = [(n, {"sum": n}) for n in sizes if candidate.sums and self.asked.processes > 1]
        if candidate.trains:
            asked.append((STEPS, {"steps": steps}))
        for what, message in asked:
            before = loopback_bytes()
            answers = self._ask(name, message)
            if answers is None:
                return
            self._add(self._rows[name], what, answers, loopback_bytes() - before, steps, counts)

    @staticmethod
    def _add(row: Row, what: Any, answers: list[dict], sent: int, steps: int, counts: bool) -> None:
        each = steps if what == STEPS else 1
        row.wrong_sums += sum(answer.get("wrong", 0) for answer in answers)
        if counts:
            slowest = max(answer["seconds"] for answer in answers)
            row.seconds.setdefault(what, []).append(slowest / each)
            row.lo_bytes.setdefault(what, []).append(sent / each / row.processes)

    def _ask(self, name: str, message: Mapping) -> list[dict] | None:
        """All ranks' answers; None, and the job is ended, if one gave none."""
        job = self._jobs.get(name)
        if job is None:
            return None
        try:
            return job.ask(message)
        except Lost as how:
            self.failed[name] = str(how)
            self._jobs.pop(name).close()
            return None


def loopback_bytes() -> int:
    """Bytes that this machine's loopback network has carried; 0 where Linux does not say."""
    with open("/proc/net/dev") as lines:
        for line in lines:
            name, _, figures = line.partition(":")
            if name.strip() == "lo":
                return int(figures.split()[0])
    return 0
