"""What a soak saw of a training process, and the laws that tell whether it stayed as it was."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from benchmarks.training.candidates import Setting

ALLOWED_BYTES = 8_000_000  # 2000 steps that each lose a page of 4 KiB
LEAST_RATIO = 0.97  # of the last tenth's images/s to the first's
MB = 1e6


@dataclass(frozen=True)
class Sample:
    """The process after ``steps`` steps; its times are of those since the sample before.

    ``seconds`` are the clock's, ``cpu_seconds`` those of all its threads on any processor.
    """

    steps: int
    seconds: float
    cpu_seconds: float
    resident_bytes: int
    threads: int
    descriptors: int


class Middle(NamedTuple):
    """The median of some figures, and their lower and upper quartile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4g} (quartiles {self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class Soak:
    """Many steps of the candidate ``name``.

    ``warm`` is the process after the warm-up, ``samples`` what it was from there on, in order.
    ``replicas`` is of the end, as :func:`alike.compare` tells it; ``losses``: the first, the last.
    """

    name: str
    setting: Setting
    warm: Sample
    samples: Sequence[Sample]
    replicas: Mapping[str, int]
    losses: tuple[float, float]

    @property
    def title(self) -> str:
        """Candidate, workload, batch and devices."""
        return f"{self.name}, {self.setting.title}"

    @property
    def tenth(self) -> int:
        """How many samples are a tenth of them, rounded down; at least 1."""
        return max(1, len(self.samples) // 10)

    @property
    def line(self) -> tuple[float, float]:
        """Bytes a step, and bytes at step 0: the least-squares line of the resident memory.

        Through the last nine tenths of the samples, so that what the first steps take to begin
        with (pools that fill, caches of operators) does not count.
        """
        settled = self._settled
        first = settled[0].resident_bytes  # taken off, so that the fit of a flat line is exact
        if len(settled) < 2:
            return 0.0, float(first)
        steps = np.array([sample.steps for sample in settled], float)
        more = np.array([sample.resident_bytes - first for sample in settled], float)
        slope, start = np.polyfit(steps, more, 1)
        return float(slope), float(first + start)

    @property
    def growth(self) -> float:
        """Bytes by which that line rises over the last nine tenths."""
        settled = self._settled
        return self.line[0] * (settled[-1].steps - settled[0].steps)

    @property
    def images_per_second(self) -> list[float]:
        """Of each sample."""
        return [self.setting.samples * n / s.seconds for n, s in self._with_steps()]

    @property
    def throughput(self) -> tuple[Middle, Middle]:
        """Images/s in the first and in the last tenth of the samples."""
        return self._first_and_last(self.images_per_second)

    @property
    def cpu_per_step(self) -> tuple[Middle, Middle]:
        """Seconds of processors a step, likewise: a machine busy with other things adds less."""
        return self._first_and_last([s.cpu_seconds / n for n, s in self._with_steps()])

    @property
    def ratio(self) -> float:
        """The median images/s of the last tenth over that of the first."""
        first, last = self.throughput
        return last.median / first.median

    @property
    def complaints(self) -> dict[str, str]:
        """What did not stay as it was, or is not as it should be, in words; empty if all is well.

        Keys, as far as there is something to say: "memory", "threads", "descriptors", "replicas",
        "finite", "loss" and "throughput".
        """
        found = dict(self._changed())
        found.update(self._untrained())
        if not self.ratio >= LEAST_RATIO:
            first, last = self.throughput
            before, after = (1e3 * cpu.median for cpu in self.cpu_per_step)
            found["throughput"] = (
                f"images/s of the last tenth are {self.ratio:.3f} of the first's, less than "
                f"{LEAST_RATIO:g}: median {first}, then {last}; a step took {before:.2f} ms of "
                f"the processors' time, then {after:.2f}"
            )
        return found

    def _changed(self) -> Iterator[tuple[str, str]]:
        """What the process holds more or less of than it should."""
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

    def _untrained(self) -> Iterator[tuple[str, str]]:
        """What is wrong with the parameters at the end."""
        devices, of = len(self.setting.ctx), self.replicas
        if of["devices"] != devices:
            yield "replicas", f"replicas of {of['devices']} devices were compared, not of {devices}"
        if of["differing"]:
            what = "parameters differ between devices"
            yield "replicas", f"{of['differing']} of {of['parameters']} {what}"
        if of["not_finite"]:
            yield "finite", f"{of['not_finite']} of {of['parameters']} parameters are not finite"
        first, last = self.losses
        if not last < first:
            yield "loss", f"the loss did not fall: {first:.4f} at first, {last:.4f} at the end"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: verdict and figures, and of each quantity all samples."""
        first, last = self.throughput
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
            "images_per_second": {"first_tenth": first._asdict(), "last_tenth": last._asdict()},
            "replicas": dict(self.replicas),
            "losses": list(self.losses),
            "after_warmup": asdict(self.warm),
            **{key: [asdict(s)[key] for s in self.samples] for key in asdict(self.warm)},
        }

    @property
    def _settled(self) -> Sequence[Sample]:
        return self.samples[self.tenth :] or self.samples

    def _with_steps(self) -> list[tuple[int, Sample]]:
        """Each sample, and how many steps its times are of."""
        starts = [0, *(s.steps for s in self.samples)]
        return [(s.steps - start, s) for start, s in zip(starts, self.samples)]

    def _first_and_last(self, values: Sequence[float]) -> tuple[Middle, Middle]:
        first, last = values[: self.tenth], values[-self.tenth :]
        return middle(first), middle(last)


def middle(values: Sequence[float]) -> Middle:
    """Median and quartiles.

    >>> str(middle([1, 2, 3, 4, 1000]))
    '3 (quartiles 2 to 4)'
    """
    low, median, high = np.percentile(values, (25, 50, 75))
    return Middle(float(median), float(low), float(high))
