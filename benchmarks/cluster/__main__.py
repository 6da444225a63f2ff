"""Measure sums and steps of several processes beside Horovod and MXNet's dist_sync; predict more.

python -m benchmarks.cluster
python -m benchmarks.cluster --processes 2 --horovod-python ~/hvd/bin/python --json out.json
python -m benchmarks.cluster --latency-us 25 --gbit 10     # predict for this network

The processes of all candidates run on this machine at once; the candidates take turns, and the
processes of the others are stopped meanwhile.

Exit code: 0; 1 if a sum was wrong, a loss another than the others', or a candidate failed; 2 for a
request that cannot be met; 130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import sys

from benchmarks.cluster import tables
from benchmarks.cluster.candidates import CANDIDATES, measure
from benchmarks.jobs import Comparison
from gluonpar.diagnostics import harness
from gluonpar.options import Measured, option
from gluonpar.runtime import threads

SIZES = 256, 16384, 262144, 11000000  # float32: 1 KiB, 64 KiB, 1 MiB and 44 MB
LENET_BYTES = 4 * 129_068


def main(argv=None) -> int:
    """Measure what ``argv`` asks for and print it; return the exit code."""
    return harness.conduct(Asked, argv, prepare, measure_all, "benchmarks.cluster")


@dataclasses.dataclass(frozen=True)
class Asked(Measured):
    """The options."""

    about = __doc__.partition("\n")[0]

    processes: tuple[int, ...] = option(
        (1, 2, 4), "numbers of processes (%(default)s)", "P,...", least=1
    )
    sizes: tuple[int, ...] = option(SIZES, "float32 in the arrays to sum", "N,...", least=1)
    candidates: tuple[str, ...] = option(
        tuple(CANDIDATES), "what to measure (all)", "A,B", choices=CANDIDATES
    )
    batch_size: int = option(256, "images per step, over all processes (256)", "N", least=1)
    steps: int = option(5, "steps per sample (%(default)s)", "N", least=1)
    rounds: int = option(12, "samples of each candidate (%(default)s)", "N", least=1)
    horovod_python: str = option(sys.executable, "interpreter that has Horovod", "PATH")
    latency_us: float | None = option(
        None, "predict for a network of this latency, in microseconds (as fitted)", "T", least=0
    )
    gbit: float | None = option(
        None, "and of this bandwidth, in Gbit/s (as fitted)", "B", least=1e-9
    )
    compute_ms: float | None = option(
        None, "predict for this much computation per step (as measured)", "T", least=0
    )
    model_bytes: int = option(
        LENET_BYTES, "predict for these gradients (%(default)s)", "N", least=0
    )


def prepare(options):
    """Raise ValueError for what cannot be measured."""
    most = max(options.processes)
    if options.batch_size < most:
        raise ValueError(
            f"batch_size must be at least {most}, the number of processes, got {options.batch_size}"
        )
    return options


def measure_all(options, console, record):
    """Print tables for each number of processes, and the prediction; return complaints."""
    header(console, record)
    failed = []
    for number in options.processes:
        with Comparison() as comparison:
            rows = measure(number, options, comparison, harness.progress_bar)
        show(console, options, number, comparison, rows)
        record.rows += rows
        failed += [f"{name} on {number} processes" for name in comparison.failed]
        record.write()
    for line in tables.prediction(options, record.rows, threads.cores()):
        console.line(line)
    wrong = [f"{row.name} on {row.processes} processes" for row in record.rows if row.wrong]
    lines = [f"wrong sums, or another loss than the others': {'; '.join(wrong)}"] if wrong else []
    return lines + ([f"failed: {'; '.join(failed)}"] if failed else [])


def header(console, record):
    """Print what the figures depend on and what they mean."""
    options = record.options
    rows = {
        "samples": f"{options.rounds} rounds, all candidates in turns; the median, iqr the "
        "interquartile range, of the slowest rank from a barrier on",
        "all-reduce": "of one float32 array per process, in host memory, to all processes",
        "training": f"LeNet, {options.steps} steps per sample on {options.batch_size} images per "
        "step over all processes, cores / processes threads each",
        "lo": "what the loopback network carried meanwhile, per process, without shared memory",
    }
    record.header(console, rows)
    for name in options.candidates:
        console.line(f"{name}: {CANDIDATES[name].about}")


def show(console, options, number, comparison, rows):
    """Print the tables for this number of processes, and which candidates are missing."""
    console.line(f"\n{number} process{'es' if number > 1 else ''}")
    for line in tables.sums(rows, options.sizes) if number > 1 else []:
        console.line(line)
    for line in tables.steps(rows):
        console.line(line)
    for line in comparison.missing():
        console.notice(line)


if __name__ == "__main__":
    sys.exit(main())
