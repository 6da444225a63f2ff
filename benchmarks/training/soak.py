"""Many steps of one candidate: does its process stay as it was?"""

from __future__ import annotations

from typing import Callable, Iterable, Sequence

import numpy as np

from benchmarks.training import process, vitals
from benchmarks.training.candidates import CANDIDATES, OURS, Setting, launch
from benchmarks.training.steady import Sample, Soak

NUM_SAMPLES, FEWEST_STEPS = 200, 100
# Those that train in one process, and whose devices' parameters must be the same.
SOAKABLE = tuple(
    name
    for name, of in CANDIDATES.items()
    if of.module in ("ours", "gluon") and of.exchanges and of.cuts
)


def soak(
    setting: Setting,
    steps: int,
    name: str = OURS,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Soak:
    """Train ``steps`` steps after the warm-up, in a process of its own; 200 samples, or fewer.

    A sample is at least one step, and waits for the last one's end. ``progress`` may wrap the
    iteration over them, as ``tqdm`` does. ValueError as from :func:`check`;
    :class:`process.Died` if the process does.
    """
    check(steps, [name])
    ends = np.linspace(0, steps, min(NUM_SAMPLES, steps) + 1).astype(int).tolist()
    child = process.Child(*launch(name, setting))
    try:
        first_loss = child.hear()["loss"]
        warm = Sample(0, **child.ask({"steps": setting.warmup}))
        samples = [
            Sample(end, **child.ask({"steps": end - start}))
            for start, end in progress(list(zip(ends, ends[1:])))
        ]
        report = child.ask({"report": True})
    finally:
        child.end()
    losses = first_loss, report["loss"]
    return Soak(name, setting, warm, tuple(samples), report["replicas"], losses)


def check(steps: int, names: Sequence[str]) -> None:
    """ValueError for too few steps, a candidate that cannot be soaked, or a system without /proc.

    A tenth of the samples must be enough for a median: 10 of 100.
    """
    if steps < FEWEST_STEPS:
        raise ValueError(f"soak={steps} steps show nothing; give 20000, or at least {FEWEST_STEPS}")
    for name in names:
        if name not in SOAKABLE:
            there = ", ".join(SOAKABLE)
            raise ValueError(f"candidates={name} cannot be soaked; these can: {there}")
    if not vitals.now()["threads"]:
        raise ValueError(f"soak={steps} reads /proc, which only Linux has; run it there")
