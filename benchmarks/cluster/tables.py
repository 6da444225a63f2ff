"""The cluster benchmark's figures as lines of text."""

from __future__ import annotations

from typing import Any, Sequence

from benchmarks.cluster import model
from benchmarks.cluster.contest import STEPS, Row
from gluonpar.diagnostics.benchmark import measure
from gluonpar.diagnostics.benchmark.options import columns

WIDTHS = (-18, 10, 9, 9, 8, 11)
OURS, FLOOR, MB = "gluonpar", "floor", 1e6
PREDICTED = (8, 16, 32, 64, 128, 256, 512, 1024)


def sums(rows: Sequence[Row], sizes: Sequence[int]) -> list[str]:
    """The all-reduces, size by size: how long, beside ours, and what the loopback carried."""
    heads = ("all-reduce", "elements", "ms", "iqr ms", "/ ours", "lo MB/proc")
    lines = [columns(heads, WIDTHS)]
    for n in sizes:
        ours = next((row.median(n) for row in rows if row.name == OURS and n in row.seconds), None)
        lines += [_line(row, n, n, ours) for row in rows if n in row.seconds]
    return lines


def steps(rows: Sequence[Row]) -> list[str]:
    """The training steps: how long, beside the floor, and what the loopback network carried."""
    heads = ("training", "loss", "ms/step", "iqr ms", "/ floor", "lo MB/proc")
    lines = [columns(heads, WIDTHS)]
    trained = [row for row in rows if STEPS in row.seconds]
    floor = next((row.median(STEPS) for row in trained if row.name == FLOOR), None)
    return lines + [_line(row, STEPS, f"{row.last_loss:.4f}", floor) for row in trained]


def _line(row: Row, what: Any, second: Any, beside: float | None) -> str:
    samples, carried = measure.Samples(tuple(row.seconds[what])), row.lo_bytes[what]
    ratio = "-" if beside is None else f"{samples.median / beside:.2f}"
    cells = (f"{1e3 * samples.median:.3f}", f"{1e3 * samples.spread:.3f}", ratio)
    middle = measure.Samples(tuple(carried)).median
    return columns((row.name, second, *cells, f"{middle / MB:.2f}"), WIDTHS)


def points(rows: Sequence[Row], cores: int) -> list[model.Measured]:
    """What the model is fitted to: our all-reduces."""
    return [
        model.Measured(row.processes, 4 * n, row.median(n), model.crowding(row.processes, cores))
        for row in rows
        if row.name == OURS and row.processes > 1
        for n in row.seconds
        if n != STEPS
    ]


def fitted(found: model.Network, measured: Sequence[model.Measured]) -> list[str]:
    """The model's three numbers, and each measurement beside what they say of it."""
    lines = [
        f"fitted: overhead {1e6 * found.overhead_seconds:.0f} us, latency "
        f"{1e6 * found.latency_seconds:.0f} us, {found.bytes_per_second / 1e9:.2f} GB/s"
    ]
    for point in measured:
        says = model.allreduce_seconds(point.processes, point.num_bytes, found, point.crowding)
        lines.append(
            f"  {point.processes} processes, {point.num_bytes} bytes: measured "
            f"{1e3 * point.seconds:.3f} ms, the model {1e3 * says:.3f} "
            f"({says / point.seconds - 1:+.0%})"
        )
    return lines


def predicted(network: model.Network, compute_seconds: float, num_bytes: int) -> list[str]:
    """A step on 8 to 1,024 processes of one device each, every one with a batch of its own."""
    lines = [
        f"predicted for processes with processors of their own: {num_bytes} bytes of gradients, "
        f"{1e3 * compute_seconds:.1f} ms of computation, overhead "
        f"{1e6 * network.overhead_seconds:.0f} us, latency {1e6 * network.latency_seconds:.0f} us, "
        f"{network.bytes_per_second / 1e9:.2f} GB/s:"
    ]
    for p in PREDICTED:
        best, worst = model.step_seconds(p, compute_seconds, num_bytes, network)
        lines.append(
            f"{p:6d} processes: {1e3 * best:7.1f} to {1e3 * worst:7.1f} ms a step, "
            f"{p * compute_seconds / worst:6.0f} to {p * compute_seconds / best:6.0f} times one"
        )
    return lines


def compute_seconds(rows: Sequence[Row]) -> float | None:
    """The floor's step on the most processes that were measured; None if it was not."""
    floors = [row for row in rows if row.name == FLOOR and STEPS in row.seconds]
    return max(floors, key=lambda row: row.processes).median(STEPS) if floors else None
