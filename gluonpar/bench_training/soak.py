"""Many steps of gluonpar's candidate: does its process grow?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterable

import numpy as np

from gluonpar.bench_training import process
from gluonpar.bench_training.candidates import OURS, Setting, launch

NUM_SAMPLES = 20
ALLOWED_BYTES = 8_000_000  # 2000 steps that each lose a page of 4 KiB


@dataclass(frozen=True)
class Soak:
    """Resident bytes of the process, ``resident[i]`` after ``steps[i]`` steps."""

    setting: Setting
    steps: tuple[int, ...]
    resident: tuple[int, ...]

    @property
    def slope(self) -> float:
        """Bytes a step, by least squares; 0 for a single sample."""
        if len(self.steps) < 2:
            return 0.0
        steps = np.array(self.steps, float)
        return float(np.polyfit(steps - steps.mean(), np.array(self.resident, float), 1)[0])

    @property
    def growth(self) -> float:
        """Bytes from the first sample to the last, on the line of that slope."""
        return self.slope * (self.steps[-1] - self.steps[0])

    @property
    def wrong(self) -> bool:
        """Whether it grew by more than is allowed."""
        return self.growth > ALLOWED_BYTES

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with all samples."""
        return {
            "name": OURS,
            "workload": self.setting.workload,
            "num_devices": len(self.setting.ctx),
            "batch_size": self.setting.samples,
            "steps": list(self.steps),
            "resident_bytes": list(self.resident),
            "slope": self.slope,
            "growth": self.growth,
            "wrong": self.wrong,
        }


def soak(
    setting: Setting, steps: int, progress: Callable[[Iterable[int]], Iterable[int]] = iter
) -> Soak:
    """Train ``steps`` steps after the warm-up, in a process of its own; 20 samples, or fewer.

    Raises ValueError for less than one step, and :class:`process.Died` if the process does.
    """
    check(steps)
    until = np.linspace(0, steps, min(NUM_SAMPLES, steps) + 1).astype(int)
    child = process.Child(*launch(OURS, setting))
    resident = []
    try:
        child.hear()
        if setting.warmup:
            child.ask({"steps": setting.warmup})
        for number in progress(np.diff(until).tolist()):
            resident.append(child.ask({"steps": number})["resident_bytes"])
    finally:
        child.end()
    return Soak(setting, tuple(until[1:].tolist()), tuple(resident))


def check(steps: int) -> None:
    """Raise ValueError unless there is something to train."""
    if steps < 1:
        raise ValueError(f"soak={steps} steps show nothing; give 2000, or at least 1")
