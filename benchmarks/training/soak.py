"""A long run of one candidate: whether its process stays as it was, and its devices alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from benchmarks.training.candidates import CANDIDATES, OURS, Setting
from gluonpar.diagnostics.benchmark.harness import Samples

NUM_SAMPLES, FEWEST_STEPS = 200, 100  # a tenth of the samples must be enough for a median
ALLOWED_BYTES = 8_000_000  # 2000 steps that each lose a page of 4 KiB
LEAST_RATIO = 0.97  # of the last tenth's images/s to the first's
MB = 1e6
# Candidates in one process, whose devices must have the same parameters.
SOAKABLE = tuple(
    name for name, of in CANDIDATES.items()
    if of.module in ("training.train_batch", "training.gluon") and of.exchanges and of.splits
)  # fmt: skip


@dataclass(frozen=True)
class SoakSample:
    """The process after ``steps`` steps; its times are of those since the sample before.

    ``seconds`` are the clock's, ``cpu_seconds`` those of all its threads on any processor.
    """

    steps: int
    seconds: float
    cpu_seconds: float
    resident_bytes: int
    threads: int
    descriptors: int


@dataclass(frozen=True)
class Soak:
    """The result of a long run of the candidate ``name``.

    ``warm`` is the process after the warm-up, ``samples`` what it was from there on, in order.
    ``replicas`` are counts at the end (:func:`training.compare_replicas`), ``losses`` the first and
    the last.
    """

    name: str
    setting: Setting
    warm: SoakSample
    samples: Sequence[SoakSample]
    replicas: Mapping[str, int]
    losses: tuple[float, float]

    @property
    def title(self) -> str:
        """Candidate, workload, batch and devices."""
        return f"{self.name}, {self.setting.title}"

    @property
    def tenth(self) -> int:
        """The number of samples in a tenth of them, at least 1."""
        return max(1, len(self.samples) // 10)

    @property
    def line(self) -> tuple[float, float]:
        """Bytes per step, and bytes at step 0, of the least-squares line of the resident memory.

        It goes through the last nine tenths of the samples, because pools and caches of operators
        fill during the first steps.
        """
        settled = self.samples[self.tenth :]
        first = settled[0].resident_bytes  # subtracted, so that the fit of a flat line is exact
        steps = np.array([sample.steps for sample in settled], float)
        more = np.array([sample.resident_bytes - first for sample in settled], float)
        slope, start = np.polyfit(steps, more, 1)
        return float(slope), float(first + start)

    @property
    def growth(self) -> float:
        """Bytes by which that line rises over the last nine tenths."""
        return self.line[0] * (self.samples[-1].steps - self.samples[self.tenth].steps)

    @property
    def images_per_second(self) -> list[float]:
        """Of each sample."""
        return [self.setting.samples * n / s.seconds for n, s in self._with_steps()]

    @property
    def throughput(self) -> tuple[Samples, Samples]:
        """Images/s in the first and in the last tenth of the samples."""
        return self._first_and_last(self.images_per_second)

    @property
    def cpu_per_step(self) -> tuple[Samples, Samples]:
        """Processor seconds per step, likewise; other programs affect them less."""
        return self._first_and_last([s.cpu_seconds / n for n, s in self._with_steps()])

    @property
    def ratio(self) -> float:
        """The median images/s of the last tenth over that of the first."""
        first, last = self.throughput
        return last.median / first.median

    @property
    def complaints(self) -> dict[str, str]:
        """What changed or is wrong, in words; empty if the process stayed as it was.

        Possible keys: "memory", "threads", "descriptors", "replicas", "finite", "loss" and
        "throughput".
        """
        return dict(self._complaints())

    def _complaints(self) -> Iterator[tuple[str, str]]:
        if not self.growth <= ALLOWED_BYTES:
            yield (
                "memory",
                f"memory grew by {self.growth / MB:.1f} MB over the last nine tenths, more than "
                f"{ALLOWED_BYTES / MB:g} MB",
            )
        for what in ("threads", "descriptors"):
            before, after = getattr(self.warm, what), getattr(self.samples[-1], what)
            if after != before:
                yield what, f"{after} {what} at the end, but {before} after the warm-up"
        devices, of = len(self.setting.ctx), self.replicas
        if of["devices"] != devices:
            yield "replicas", f"replicas of {of['devices']} devices were compared, not of {devices}"
        if of["differing"]:
            what = "parameters differ between devices"
            yield "replicas", f"{of['differing']} of {of['parameters']} {what}"
        if of["not_finite"]:
            yield "finite", f"{of['not_finite']} of {of['parameters']} parameters are not finite"
        if not self.losses[1] < self.losses[0]:
            yield (
                "loss",
                "the loss did not fall: {:.4f} at first, {:.4f} at the end".format(*self.losses),
            )
        if not self.ratio >= LEAST_RATIO:
            first, last = map(describe, self.throughput)
            before, after = (1e3 * cpu.median for cpu in self.cpu_per_step)
            yield (
                "throughput",
                f"images/s of the last tenth are {self.ratio:.3f} of the first's, less than "
                f"{LEAST_RATIO:g}: median {first}, then {last}; a step took {before:.2f} ms of "
                f"processor time, then {after:.2f}",
            )

    def as_dict(self) -> dict[str, Any]:
        """Return verdict, figures, and all samples of each quantity, for JSON."""
        tenths = {
            name: {"median": of.median, "low": of.quartiles[0], "high": of.quartiles[1]}
            for name, of in zip(("first_tenth", "last_tenth"), self.throughput)
        }
        return {
            "name": self.name,
            "workload": self.setting.workload,
            "num_devices": len(self.setting.ctx),
            "batch_size": self.setting.samples,
            "wrong": bool(self.complaints),
            "complaints": self.complaints,
            "slope": self.line[0],
            "growth": self.growth,
            "ratio": self.ratio,
            "images_per_second": tenths,
            "replicas": dict(self.replicas),
            "losses": list(self.losses),
            "after_warmup": asdict(self.warm),
            **{key: [getattr(s, key) for s in self.samples] for key in vars(self.warm)},
        }

    def _with_steps(self) -> list[tuple[int, SoakSample]]:
        """Return each sample, and the number of steps that its times are of."""
        starts = [0, *(s.steps for s in self.samples)]
        return [(s.steps - start, s) for start, s in zip(starts, self.samples)]

    def _first_and_last(self, values: Sequence[float]) -> tuple[Samples, Samples]:
        return Samples(tuple(values[: self.tenth])), Samples(tuple(values[-self.tenth :]))


def describe(samples: Samples) -> str:
    """Return median and quartiles in words.

    >>> describe(Samples((1, 2, 3, 4, 1000)))
    '3 (quartiles 2 to 4)'
    """
    low, high = samples.quartiles
    return f"{samples.median:.4g} (quartiles {low:.4g} to {high:.4g})"


def check(steps: int, names: Sequence[str]) -> None:
    """Raise ValueError for too few steps, a candidate of several processes, or without psutil."""
    if steps < FEWEST_STEPS:
        raise ValueError(f"soak must be at least {FEWEST_STEPS} steps, got {steps}; try 20000")
    for name in names:
        if name not in SOAKABLE:
            there = ", ".join(SOAKABLE)
            raise ValueError(f"candidates with soak must be among {there}; got {name!r}")
    try:
        import psutil  # noqa: F401
    except ImportError as error:
        raise ValueError(f"soak needs psutil ({error}): pip install psutil") from error


def soak(
    setting: Setting,
    steps: int,
    name: str = OURS,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Soak:
    """Train ``steps`` steps after the warm-up, in a process of its own, in at most 200 samples.

    A sample waits for the end of its last step. ``progress`` may wrap the iteration over them, as
    ``tqdm`` does. Raises :class:`jobs.Failed` if the process ends.
    """
    import psutil

    job = setting.job(name)
    process = psutil.Process(job.pids[0])

    def sample(end: int, num_steps: int) -> SoakSample:
        (times,) = job.ask({"steps": num_steps})
        counts = process.memory_info().rss, process.num_threads(), process.num_fds()
        return SoakSample(end, times["seconds"], times["cpu_seconds"], *counts)

    try:
        ends = np.linspace(0, steps, min(NUM_SAMPLES, steps) + 1).astype(int).tolist()
        warm = sample(0, setting.warmup)
        parts = progress(list(zip(ends, ends[1:])))
        samples = [sample(end, end - start) for start, end in parts]
        (report,) = job.ask({"report": True})
    finally:
        job.close()
    losses = job.ready[0]["loss"], report["loss"]
    return Soak(name, setting, warm, tuple(samples), report["replicas"], losses)
