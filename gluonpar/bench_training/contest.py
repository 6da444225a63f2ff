"""The candidates, their processes, and who trains when."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Mapping, Sequence

import mxnet as mx
import numpy as np

from gluonpar import measure, threads
from gluonpar.bench_training import process
from gluonpar.bench_training.workloads import WORKLOADS

FLOOR, REFERENCE, TORCH = "floor", "one context", "torch ddp"
TOLERANCE = 1e-3  # of the mean loss after all steps
# What decides how fast MXNet and OpenMP run: no candidate inherits it.
SETTINGS = ("MXNET_", "OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES")


@dataclass(frozen=True)
class Candidate:
    """A module of this package, and in what process it trains.

    ``team``: OMP_NUM_THREADS is every core for "all", an even share for "share", unset for "".
    ``exchanges``: it trains the same function as the others, so its loss must be theirs.
    """

    module: str
    about: str
    runtime: str = ""
    team: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    exchanges: bool = True


CANDIDATES = {
    "gluonpar": Candidate("ours", "train_batch with a plain function", "gluonpar"),
    "book": Candidate("book", "Dive into Deep Learning 13.5, MXNet as it comes", "mxnet"),
    "trainer device": Candidate(
        "gluon", "gluon.Trainer(kvstore='device'), hybridized static, MXNet as it comes", "mxnet"
    ),
    "trainer device + our runtime": Candidate(
        "gluon",
        "the same after import gluonpar and threads.share",
        "gluonpar",
        options={"share_threads": True},
    ),
    REFERENCE: Candidate(
        "gluon",
        "gluon.Trainer, hybridized static, whole batch on device 0 with every core, MXNet as it "
        "comes",
        "mxnet",
        "all",
        {"one_context": True},
    ),
    TORCH: Candidate(
        "torch_ddp", "PyTorch DistributedDataParallel, gloo, a process a device", team="share"
    ),
    FLOOR: Candidate(
        "ours",
        "gluonpar's functions, every device alone on its shard: no exchange",
        "gluonpar",
        options={"exchange": False},
        exchanges=False,
    ),
}


@dataclass(frozen=True)
class Setting:
    """What all candidates are asked for, and how often; ValueError for what cannot be asked."""

    workload: str
    ctx: Sequence[mx.Context]
    batch_size: int | None = None
    steps: int = 5
    rounds: int = 12
    warmup: int = 5
    torch_python: str = sys.executable

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rounds < 1 or self.warmup < 0:
            raise ValueError(
                f"steps={self.steps}, rounds={self.rounds}, warmup={self.warmup}; need at least "
                "1 step a sample, 1 round to be measured and 0 steps before"
            )
        if self.samples < len(self.ctx):
            raise ValueError(
                f"batch_size={self.samples} leaves some of {len(self.ctx)} devices without a "
                "sample; give at least one each"
            )

    @property
    def samples(self) -> int:
        """Samples a step, over all devices."""
        if self.batch_size is None:
            return WORKLOADS[self.workload].batch_size
        return self.batch_size


@dataclass(frozen=True)
class Row:
    """One candidate on one task.

    ``deviation`` is that of its loss from the others'; None: no matter. ``idle_cpu`` is the share
    of a core that it burnt while others trained; ``imports_gluonpar`` says that its MXNet is not as
    it comes.
    """

    name: str
    setting: Setting
    samples: measure.Samples
    first_loss: float
    last_loss: float
    deviation: float | None
    peak_bytes: int
    idle_cpu: float
    imports_gluonpar: bool = False
    version: str = ""

    @property
    def images_per_second(self) -> float:
        """At the median step."""
        return self.setting.samples / self.samples.median

    @property
    def wrong(self) -> bool:
        """Whether the loss is another than the others', or no number."""
        return self.deviation is not None and not abs(self.deviation) <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with all samples; seconds are of one step."""
        return {
            "name": self.name,
            "workload": self.setting.workload,
            "num_devices": len(self.setting.ctx),
            "batch_size": self.setting.samples,
            "median_seconds": self.samples.median,
            "quartiles_seconds": list(self.samples.quartiles),
            "images_per_second": self.images_per_second,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "deviation": self.deviation,
            "wrong": self.wrong,
            "peak_bytes": self.peak_bytes,
            "idle_cpu": self.idle_cpu,
            "imports_gluonpar": self.imports_gluonpar,
            "version": self.version,
            "seconds": list(self.samples.seconds),
        }


class Contest:
    """The candidates' processes, alive over the rounds; a context manager that ends them all.

    ``left_out`` and ``failed`` map candidates to why they are not, or no longer, among them.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.left_out: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self._children: dict[str, process.Child] = {}
        self._ready: dict[str, dict] = {}
        self._seconds: dict[str, list[float]] = {}

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *_: Any) -> None:
        for name in list(self._children):
            self._children.pop(name).end()

    def start(self, name: str) -> None:
        """Start a candidate's process, wait until it is ready, and warm it up."""
        self._children[name] = process.Child(*launch(CANDIDATES[name], self.setting))
        self._seconds[name] = []
        ready = self._answer(name)
        if ready is not None:
            self._ready[name] = ready
            if self.setting.warmup:
                self._answer(name, {"steps": self.setting.warmup})

    def measure(self, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> None:
        """One sample of every candidate in every round, in changing order."""
        names = list(self._children)
        for round_ in progress(range(self.setting.rounds)):
            for i in measure.order(len(names), round_):
                answer = self._answer(names[i], {"steps": self.setting.steps})
                if answer is not None:
                    self._seconds[names[i]].append(answer["seconds"] / self.setting.steps)

    def rows(self) -> list[Row]:
        """What came of it, for those that are still there."""
        reports = {name: self._answer(name, {"report": True}) for name in list(self._children)}
        reports = {name: report for name, report in reports.items() if report is not None}
        right = expected({name: report["loss"] for name, report in reports.items()})
        return [self._row(name, report, right) for name, report in reports.items()]

    def _row(self, name: str, report: dict, right: float) -> Row:
        deviation = report["loss"] - right if CANDIDATES[name].exchanges else None
        return Row(
            name,
            self.setting,
            measure.Samples(tuple(self._seconds[name])),
            self._ready[name]["loss"],
            report["loss"],
            deviation,
            report["peak_bytes"],
            report["idle_cpu_seconds"] / max(report["idle_seconds"], 1e-9),
            self._ready[name]["ours"],
            self._ready[name]["version"],
        )

    def _answer(self, name: str, message: dict | None = None) -> dict | None:
        """The candidate's answer; None, and it is ended, if there is none."""
        child = self._children.get(name)
        if child is None:
            return None
        try:
            return child.hear() if message is None else child.ask(message)
        except process.Unable as reason:
            self.left_out[name] = str(reason)
        except process.Died as how:
            self.failed[name] = str(how)
        self._children.pop(name).end()
        return None


def expected(losses: Mapping[str, float]) -> float:
    """The loss to agree on: one device's with the whole batch, else the exchangers' median."""
    if REFERENCE in losses:
        return losses[REFERENCE]
    exchanged = [loss for name, loss in losses.items() if CANDIDATES[name].exchanges]
    return float(np.median(exchanged)) if exchanged else float("nan")


def launch(candidate: Candidate, setting: Setting) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a candidate's process."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    teams = {"all": threads.cores(), "share": max(1, threads.cores() // len(setting.ctx))}
    if candidate.team:
        env["OMP_NUM_THREADS"] = str(teams[candidate.team])
    devices = [(c.device_type, c.device_id) for c in setting.ctx]
    task = [setting.workload, setting.samples, devices]
    request = process.request(candidate.module, task, candidate.options, candidate.runtime)
    python = setting.torch_python if candidate.module == "torch_ddp" else sys.executable
    return process.command(request, python), env
