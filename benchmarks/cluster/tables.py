"""The cluster benchmark's figures, and the model fitted to them, as lines of text."""

from __future__ import annotations

from typing import Any, Sequence

from benchmarks.cluster import model
from benchmarks.cluster.candidates import ALONE, OURS, STEPS, ProcessResult
from gluonpar.diagnostics.harness import Samples, columns

WIDTHS = (-18, 10, 9, 9, 14, 11)
PREDICTED = (8, 16, 32, 64, 128, 256, 512, 1024)


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


def points(rows: Sequence[ProcessResult], cores: int) -> list[model.Measured]:
    """Return our all-reduces, to which the model is fitted."""
    return [
        model.Measured(
            row.processes, 4 * n, row.samples(n).median, model.crowding(row.processes, cores)
        )
        for row in rows
        if row.name == OURS and row.processes > 1
        for n in row.seconds
        if n != STEPS
    ]


def prediction(options: Any, rows: Sequence[ProcessResult], cores: int) -> list[str]:
    """Return the fitted model and a step's predicted time on 8 to 1,024 processes, or why not.

    ``options`` may give another network, another computation and another number of bytes.
    """
    measured = points(rows, cores)
    if not measured:
        return []
    try:
        network = model.fit(measured)
    except ValueError as error:
        return [f"\nno model: {error}"]
    lines = ["", f"fitted: {_network(network)}"]
    for point in measured:
        seconds = model.allreduce_seconds(point.processes, point.num_bytes, network, point.crowding)
        lines.append(
            f"  {point.processes} processes, {point.num_bytes} bytes: measured "
            f"{1e3 * point.seconds:.3f} ms, the model {1e3 * seconds:.3f} "
            f"({seconds / point.seconds - 1:+.0%})"
        )
    if options.latency_us is not None:
        network = network._replace(latency_seconds=options.latency_us / 1e6)
    if options.gbit is not None:
        network = network._replace(bytes_per_second=options.gbit * 1e9 / 8)
    compute = compute_seconds(rows) if options.compute_ms is None else options.compute_ms / 1e3
    if compute is None:
        return [*lines, f"no prediction: '{ALONE}' was not measured; give --compute-ms"]
    lines.append(
        "predicted for processes with processors of their own: "
        f"{options.model_bytes} bytes of gradients, {1e3 * compute:.1f} ms of computation, "
        f"{_network(network)}:"
    )
    for p in PREDICTED:
        best, worst = model.step_seconds(p, compute, options.model_bytes, network)
        lines.append(
            f"{p:6d} processes: {1e3 * best:7.1f} to {1e3 * worst:7.1f} ms a step, "
            f"{p * compute / worst:6.0f} to {p * compute / best:6.0f} times one"
        )
    return lines


def _network(network: model.Network) -> str:
    return (
        f"overhead {1e6 * network.overhead_seconds:.0f} us, latency "
        f"{1e6 * network.latency_seconds:.0f} us, {network.bytes_per_second / 1e9:.2f} GB/s"
    )


def compute_seconds(rows: Sequence[ProcessResult]) -> float | None:
    """Return the step without exchange on the most processes; None if it was not measured."""
    alone = [row for row in rows if row.name == ALONE and STEPS in row.seconds]
    most = max(alone, key=lambda row: row.processes, default=None)
    return most.samples(STEPS).median if most else None
