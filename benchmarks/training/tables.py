"""The training benchmark's figures as lines of text."""

from __future__ import annotations

from typing import Sequence

from benchmarks.training.candidates import ALONE, PROCESSES, StepResult
from gluonpar.diagnostics.harness import columns

HEADINGS = ("candidate", "ms/step", "q1", "q3", "images/s", f"/ {ALONE}", f"/ {PROCESSES}")
HEADINGS += ("loss", "off", "peak MB")
MB = 1e6
WIDTHS = (-28, 9, 9, 9, 10, 14, 12, 9, 9, 8)


def table(rows: Sequence[StepResult]) -> list[str]:
    """Return the headings and a line for each of ``rows``, one workload on some devices."""
    lines = [columns(HEADINGS, WIDTHS)]
    alone = [_median(rows, name) for name in (ALONE, PROCESSES)]
    for row in rows:
        time, (first, third) = row.samples.median, row.samples.quartiles
        off = "-" if row.deviation is None else f"{row.deviation:+.1e}"
        figures = [f"{1e3 * seconds:.2f}" for seconds in (time, first, third)]
        figures.append(f"{row.images_per_second:.0f}")
        loss, peak = f"{row.last_loss:.4f}", f"{row.peak_bytes / MB:.0f}"
        cells = (row.name, *figures, *(_ratio(time, each) for each in alone), loss, off, peak)
        lines.append(columns(cells, WIDTHS))
    return lines


def memory(row: StepResult) -> str:
    """Compare the memory of the arrays of one device, the fullest, with a plain run's."""
    most = max(row.memory, key=lambda device: sum(device.values()))
    plain = most["parameters"] + most["gradients"]
    others = "" if "others" not in most else f", others {most['others'] / MB:.2f} MB"
    return (
        f"{row.name}: arrays of one device between steps: parameters "
        f"{most['parameters'] / MB:.2f} MB, gradients {most['gradients'] / MB:.2f} MB{others}; "
        f"a plain single-device run holds parameters and gradients, {plain / MB:.2f} MB"
    )


def summary(rows: Sequence[StepResult]) -> list[str]:
    """Return a line per workload and candidate, with columns for each number of devices K.

    They are the step's time, its ratio to that without exchange, and the speedup over K = 1.
    """
    counts = sorted({len(row.setting.ctx) for row in rows})
    headings, widths = ["workload", "candidate"], [-9, -28]
    for k in counts:
        headings += [f"K={k} ms", f"/ {ALONE}", "x K=1"]
        widths += [10, 14, 6]
    lines = [columns(headings, widths)]
    for workload, name in dict.fromkeys((row.setting.workload, row.name) for row in rows):
        cells = [workload, name]
        for k in counts:
            there = [r for r in rows if (r.setting.workload, len(r.setting.ctx)) == (workload, k)]
            time = _median(there, name)
            alone = _median([r for r in rows if r.setting.workload == workload], name, k=1)
            cells += [f"{1e3 * time:.2f}" if time else "-", _ratio(time, _median(there, ALONE))]
            cells.append(_ratio(alone, time))
        lines.append(columns(cells, widths))
    return lines


def _median(rows: Sequence[StepResult], name: str, k: int | None = None) -> float | None:
    """Return the seconds of the candidate ``name``, if it is among ``rows``."""
    for row in rows:
        if row.name == name and k in (None, len(row.setting.ctx)):
            return row.samples.median
    return None


def _ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a and b else "-"
