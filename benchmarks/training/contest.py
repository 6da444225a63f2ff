"""The candidates' processes, who trains when, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Mapping

import numpy as np

from benchmarks.training import process
from benchmarks.training.candidates import REFERENCE, TRAINER, Setting, comparable, launch
from gluonpar.diagnostics.benchmark import measure

TOLERANCE = 1e-3  # of the mean loss after all steps


@dataclass(frozen=True)
class Row:
    """One candidate on one task.

    ``deviation`` is that of its loss from the others'; None: no matter. ``idle_cpu`` is the share
    of a core that it burnt while others trained; ``imports_gluonpar`` says that its MXNet is not as
    it comes; ``memory`` is that of its arrays, a dict a device, or empty
    (:meth:`training.Training.memory`).
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
    memory: list[dict[str, int]] = field(default_factory=list)

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
            "memory": self.memory,
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
        self._children[name] = process.Child(*launch(name, self.setting))
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
        right = expected({name: report["loss"] for name, report in reports.items()}, self.setting)
        return [self._row(name, report, right) for name, report in reports.items()]

    def _row(self, name: str, report: dict, right: float) -> Row:
        deviation = report["loss"] - right if comparable(name, self.setting) else None
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
            report["memory"],
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


def expected(losses: Mapping[str, float], setting: Setting) -> float:
    """The loss to agree on: one context's with the whole batch if it must agree with the others'.

    Where each shard is normalised by itself, it is that of MXNet's own Trainer. Without either, it
    is the median.
    """
    agreeing = {name: loss for name, loss in losses.items() if comparable(name, setting)}
    for reference in (REFERENCE, TRAINER):
        if reference in agreeing:
            return agreeing[reference]
    return float(np.median(list(agreeing.values()))) if agreeing else float("nan")
