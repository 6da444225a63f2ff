"""The cluster benchmark's figures as lines of text."""

from __future__ import annotations

from typing import Any, Sequence

from benchmarks.cluster.candidates import ALONE, OURS, STEPS, ProcessResult
from gluonpar.diagnostics.harness import Samples, columns

WIDTHS = (-18, 10, 9, 9, 14, 11)


def sums(rows: Sequence[ProcessResult], sizes: Sequence[int]) -> list[str]:
    """Return the all-reduces by size: time, ratio to ours, and what the loopback carried."""
    heads = ("all-reduce", "elements", "ms", "iqr ms", "/ ours", "lo MB/proc")
    lines = [columns(heads, WIDTHS)]
    for n in sizes:
        measured = [row for row in rows if n in row.seconds]
        lines += [_line(row, n, n, _median(measured, OURS, n)) for row in measured]
    return lines


def steps(rows: Sequence[ProcessResult]) -> list[str]:
    """Return the steps: time, ratio to that without exchange, and what the loopback carried."""
    heads = ("training", "loss", "ms/step", "iqr ms", f"/ {ALONE}", "lo MB/proc")
    lines = [columns(heads, WIDTHS)]
    trained = [row for row in rows if STEPS in row.seconds]
    alone = _median(trained, ALONE, STEPS)
    return lines + [_line(row, STEPS, f"{row.last_loss:.4f}", alone) for row in trained]


def _median(rows: Sequence[ProcessResult], name: str, part: Any) -> float | None:
    return next((row.samples(part).median for row in rows if row.name == name), None)


def _line(row: ProcessResult, part: Any, second: Any, reference: float | None) -> str:
    samples, carried = row.samples(part), Samples(tuple(row.lo_bytes[part]))
    ratio = "-" if reference is None else f"{samples.median / reference:.2f}"
    cells = (f"{1e3 * samples.median:.3f}", f"{1e3 * samples.spread:.3f}", ratio)
    return columns((row.name, second, *cells, f"{carried.median / 1e6:.2f}"), WIDTHS)
