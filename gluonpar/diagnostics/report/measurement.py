"""Collect a report's figures: run its parts, each in a process of its own, in a limited time.

A part may raise an exception, end its process or hang: that becomes a finding, and the others are
run. If it did so during a candidate's turn, it is repeated without this candidate.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx

from gluonpar.diagnostics.benchmark import harness
from gluonpar.diagnostics.child_process import ChildFailed, messages
from gluonpar.diagnostics.doctor import command as doctor
from gluonpar.diagnostics.doctor.checks import CHECKS
from gluonpar.diagnostics.report.conclusions import number
from gluonpar.install import wheels
from gluonpar.install.entry import FLOAT32

FORMAT = 1
SECONDS = 400.0  # with what is not limited, such as starting processes, less than ten minutes

# What each part tells, message by message (parts.py).
TOLD = {
    "devices": ("gpus", "peers", "libraries"),
    "self test": ("lines", "failures"),
    "copies": ("rows",),
    "all-reduce": ("rows", "choices"),
    "steps": ("rows",),
}

Say = Callable[[str], object]


def collect(
    ctx: Sequence[mx.Context],
    seconds: float = SECONDS,
    batch_size: int | None = None,
    line: Say = print,
    progress: Say = lambda text: None,
) -> dict[str, Any]:
    """Return all that is found on the devices ``ctx``, for JSON.

    ``seconds`` are shared out among the benchmarks, and decide how often each figure is measured:
    at least once, however long that takes. ``batch_size`` is that of the training steps, per device
    (None: ``steps.BATCH_SIZES``). The self test's lines go to ``line``, as they come, and what is
    done next to ``progress``.
    """
    start = time.monotonic()
    machine = {**harness.machine(), "wheels": wheels.installed()}
    report: dict[str, Any] = {"format": FORMAT, "machine": machine, "seconds": seconds}
    for part, keys in TOLD.items():
        report[part] = {key: [] for key in keys}
    report["devices"]["names"] = [str(context) for context in ctx]
    report["failed"] = []
    progress("doctor")
    report["doctor"] = [found._asdict() for topic in CHECKS for found in doctor.examine(topic)]
    for part in ("devices", "self test"):
        progress(part)
        for told in _run(part, ctx, report["failed"]):
            _keep(told, report[part])
            if "lines" in told:
                line(told["lines"])
    failing: dict[str, list[str]] = {}  # candidates, by benchmark
    deadline = time.monotonic() + seconds
    for (part, devices, given), end in harness.shares(_benchmarks(ctx, batch_size), deadline):
        name = given.get("workload", part)
        progress(f"{name} on {number(len(devices))}, until {end - start:.0f} s")
        without = failing.setdefault(name, [])
        given = {**given, "without": without, "deadline": end}
        for told in _repeated(part, devices, report["failed"], without, given):
            _keep(told, report[part])
    report["took_seconds"] = time.monotonic() - start
    return report


def _benchmarks(
    ctx: Sequence[mx.Context], batch_size: int | None
) -> list[tuple[str, Sequence[mx.Context], dict[str, Any]]]:
    """Return part, devices and arguments of each; K is 1, 2, 4, ... and the number of devices."""
    together = ("copies", "all-reduce") if len(ctx) > 1 else ()
    powers = [1 << i for i in range(len(ctx).bit_length()) if 1 << i < len(ctx)]
    return [(part, ctx, {}) for part in together] + [
        ("steps", ctx[:k], {"workload": workload, "batch_size": batch_size})
        for workload in ("lenet", "resnet18")
        for k in [*powers, len(ctx)]
    ]


def _repeated(
    part: str,
    ctx: Sequence[mx.Context],
    failed: list[dict[str, Any]],
    without: list[str],
    given: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return what the part tells; repeat it as long as there is a candidate to go on without."""
    while True:
        num_failed = len(failed)
        told = list(_run(part, ctx, failed, **given))
        candidate = failed[-1]["candidate"] if len(failed) > num_failed else None
        if candidate is None or candidate in without:
            return told
        without.append(candidate)


def _run(
    part: str, ctx: Sequence[mx.Context], failed: list[dict[str, Any]], **given: Any
) -> Iterator[dict[str, Any]]:
    """Give what the part tells; how it fails, if it does, is added to ``failed``."""
    devices = [(context.device_type, context.device_id) for context in ctx]
    argument = json.dumps({"part": part, "devices": devices, **given})
    command = [sys.executable, "-m", f"{__package__}.parts", argument]
    environment = {**FLOAT32, **os.environ} if part == "self test" else None
    candidate = None
    try:
        for told in messages(command, environment=environment):
            candidate = told.get("candidate", candidate)
            yield told
    except ChildFailed as how:
        what = {"part": given.get("workload", part), "num_devices": len(ctx)}
        failed.append({**what, "candidate": candidate, "how": str(how)})


def _keep(told: dict[str, Any], kept: dict[str, list]) -> None:
    for key in kept.keys() & told.keys():
        kept[key].append(told[key])
