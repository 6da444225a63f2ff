"""The candidates of the cluster benchmark, and the measurement on one number of processes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Sequence

from benchmarks.jobs import (
    Comparison,
    Program,
    expected_loss,
    is_wrong,
    mpirun,
    mpirun_over_tcp,
    parameter_servers,
)
from benchmarks.training import candidates as training
from benchmarks.training.candidates import ALONE, HOROVOD, OURS
from gluonpar.diagnostics.harness import Progress, Samples

STEPS, WARMUP = "steps", 2

_BY_MPI = Program(
    "cluster.ranks",
    "cluster.allreduce; train_batch",
    "gluonpar",
    mpirun,
    {"store": "gluonpar", "kind": "train_batch"},
    team="share",
    ranks=True,
    sums=True,
)
_TRAINER = "gluonpar.Trainer on a Gluon network"
_BY_SERVERS = replace(
    _BY_MPI,
    about="MXNet's kvstore: push and pull, over TCP",
    runtime="mxnet",
    launch=parameter_servers,
    options={"store": "dist_sync", "kind": ""},
    trains=False,
)
_NO_EXCHANGE = "one process with as many devices that exchange nothing, as in benchmarks.training"
CANDIDATES = {
    OURS: _BY_MPI,
    "gluonpar trainer": replace(
        _BY_MPI, about=_TRAINER, options={"store": "gluonpar", "kind": "trainer"}, sums=False
    ),
    "gluonpar over tcp": replace(
        _BY_MPI, about="as gluonpar, but MPI without shared memory", launch=mpirun_over_tcp
    ),
    HOROVOD: replace(
        training.CANDIDATES[HOROVOD],
        about="allreduce_; DistributedTrainer; gloo, over TCP",
        sums=True,
    ),
    "dist_sync": _BY_SERVERS,
    "trainer dist_sync": replace(
        _BY_SERVERS,
        about="gluon.Trainer with that kvstore",
        options={"store": "dist_sync", "kind": "trainer"},
        sums=False,
        trains=True,
    ),
    ALONE: replace(training.CANDIDATES[ALONE], about=_NO_EXCHANGE),
}


@dataclass
class ProcessResult:
    """One candidate on a number of processes.

    ``seconds[n]`` are the slowest rank's of the all-reduce of n float32, ``seconds["steps"]`` those
    of a training step; ``lo_bytes`` what the loopback network carried meanwhile, per process.
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
        """Whether a sum was wrong, or the loss is not the expected one."""
        return bool(self.wrong_sums) or is_wrong(self.deviation)

    def samples(self, part: Any) -> Samples:
        """Return the seconds of the sums of ``part`` elements, or of the steps."""
        return Samples(tuple(self.seconds[part]))

    def add(
        self, part: Any, answers: Sequence[dict], carried: int, parts: int, counts: bool
    ) -> None:
        """Add one sample, of ``parts`` steps or one sum; its errors count in the warm-up, too."""
        self.wrong_sums += sum(answer.get("wrong", 0) for answer in answers)
        if counts:
            slowest = max(answer["seconds"] for answer in answers)
            self.seconds.setdefault(part, []).append(slowest / parts)
            self.lo_bytes.setdefault(part, []).append(carried / parts / self.processes)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, with all samples, for JSON."""
        return {**vars(self), "wrong": self.wrong}


def measure(
    processes: int,
    options: Any,
    comparison: Comparison,
    progress: Callable[[str], Progress] = lambda title: iter,
) -> list[ProcessResult]:
    """Start the candidates, let them run in turns, and return their results.

    ``options`` are those of the command line.
    """
    task = ["lenet", options.batch_size, [("cpu", i) for i in range(processes)]]
    rows = {}
    for name in progress("starting")(options.candidates):
        python = options.horovod_python if name == HOROVOD else sys.executable
        comparison.start(name, CANDIDATES[name], task, python)
        if name in comparison.jobs:
            loss = sum(answer["loss"] for answer in comparison.jobs[name].ready)
            rows[name] = ProcessResult(name, processes, options.batch_size, first_loss=loss)
    bar = progress(f"{processes} processes")
    for name, counts in comparison.turns(options.rounds, WARMUP, bar):
        program = CANDIDATES[name]
        parts = [(n, "add", n) for n in options.sizes if program.sums and processes > 1]
        parts += [(STEPS, "steps", options.steps)] * program.trains
        for part, verb, number in parts:
            before = loopback_bytes()
            answers = comparison.ask(name, **{verb: number})
            if answers:
                each = number if part == STEPS else 1
                rows[name].add(part, answers, loopback_bytes() - before, each, counts)
    for name in list(comparison.jobs):
        answers = comparison.ask(name) if CANDIDATES[name].trains else []
        if answers:
            rows[name].last_loss = sum(answer["loss"] for answer in answers)
    measured = [rows[name] for name in comparison.jobs]
    agreeing = [r for r in measured if CANDIDATES[r.name].exchanges and r.last_loss is not None]
    right = expected_loss({row.name: row.last_loss for row in agreeing})
    for row in agreeing:
        row.deviation = row.last_loss - right
    return measured


def loopback_bytes() -> int:
    """Return the bytes that this machine's loopback network has carried; 0 if not known."""
    with open("/proc/net/dev") as lines:
        for line in lines:
            name, _, figures = line.partition(":")
            if name.strip() == "lo":
                return int(figures.split()[0])
    return 0
