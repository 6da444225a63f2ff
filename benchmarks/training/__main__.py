"""Measure training steps of gluonpar and other libraries, each in its own process, all in turns.

python -m benchmarks.training --num-gpus 2
python -m benchmarks.training --workload mlp --num-gpus 1,2,4 --device cpu --rounds 6
python -m benchmarks.training --torch-python ~/torch/bin/python --json a.json

Exit code: 0; 1 if a candidate failed, or trained another function than the others; 2 for a request
that cannot be met; 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys

from benchmarks.jobs import TOLERANCE, Comparison
from benchmarks.training import tables
from benchmarks.training.candidates import (
    CANDIDATES,
    LIBRARIES,
    OURS,
    REFERENCE,
    TRAINER,
    Setting,
    measure,
)
from benchmarks.training.workloads import WORKLOADS
from gluonpar.diagnostics import harness
from gluonpar.options import DEVICES, Measured, option
from gluonpar.runtime import devices


def main(argv=None) -> int:
    """Measure what ``argv`` asks for and print it workload by workload; return the exit code."""
    return harness.conduct(Asked, argv, prepare, compare, "benchmarks.training")


@dataclasses.dataclass(frozen=True)
class Asked(Measured):
    """The options."""

    about = __doc__.partition("\n")[0]

    device: str = option(
        "auto", "gpu: GPUs only; cpu: CPU devices; auto: GPUs if there are any", choices=DEVICES
    )
    workload: tuple[str, ...] = option(
        tuple(WORKLOADS), "what to train (all)", "A,B", choices=WORKLOADS
    )
    num_gpus: tuple[int, ...] = option((2,), "numbers of devices (2)", "K,...", least=1)
    candidates: tuple[str, ...] = option(
        tuple(CANDIDATES), "what to measure (all)", "A,B", choices=CANDIDATES
    )
    batch_size: int | None = option(
        None, "samples per step, over all devices (the workload's)", "N", least=1
    )
    steps: int = option(5, "steps per sample (%(default)s)", "N", least=1)
    rounds: int = option(12, "samples of each candidate (%(default)s)", "N", least=1)
    warmup: int = option(5, "steps before that do not count (%(default)s)", "N", least=0)
    interleave: bool = option(
        False, "settings take turns in each round, so that a drift is in all of them alike"
    )
    torch_python: str = option(sys.executable, "interpreter that has PyTorch", "PATH")
    horovod_python: str = option(sys.executable, "interpreter that has Horovod", "PATH")
    tensorflow_python: str = option(sys.executable, "interpreter that has TensorFlow", "PATH")
    jax_python: str = option(sys.executable, "interpreter that has JAX", "PATH")


def prepare(options):
    """Return the settings in turn, and notices on their devices; ValueError if not possible."""
    libraries = {name: name.split()[0] for name in options.candidates}
    pythons = {
        name: getattr(options, f"{library}_python")
        for name, library in libraries.items()
        if library in LIBRARIES
    }
    chosen = [devices.choose(num_gpus=k, device=options.device) for k in options.num_gpus]
    often = (options.batch_size, options.steps, options.rounds, options.warmup, pythons)
    settings = [Setting(work, choice.ctx, *often) for work in options.workload for choice in chosen]
    return settings, [choice.notice for choice in chosen if choice.notice]


def compare(prepared, console, record):
    """Print a table for each setting and one of all; return complaints."""
    settings, notices = prepared
    for notice in notices:
        console.notice(notice)
    header(console, record)
    failed = record.more["failed"] = []
    left_out = record.more["left_out"] = []
    for group in [settings] if record.options.interleave else [[one] for one in settings]:
        with contextlib.ExitStack() as stack:
            comparisons = [stack.enter_context(Comparison()) for _ in group]
            names = record.options.candidates
            results = measure(group, comparisons, names, harness.progress_bar)
        for setting, comparison, rows in zip(group, comparisons, results):
            show(console, setting, comparison, rows)
            record.rows += rows
            failed += [[setting.title, *failure] for failure in comparison.failed.items()]
            left_out += [[setting.title, *left] for left in comparison.left_out.items()]
        record.write()
    if len(settings) > 1:
        for line in ["", *tables.summary(record.rows)]:
            console.line(line)
    wrong = [f"{row.name} on {row.setting.title}" for row in record.rows if row.wrong]
    lines = [f"another loss than the others': {'; '.join(wrong)}"] if wrong else []
    dead = [f"{name} on {title}" for title, name, _ in failed]
    return lines + ([f"failed: {'; '.join(dead)}"] if dead else [])


def header(console, record):
    """Print what the figures depend on and what they mean."""
    options = record.options
    rows = {
        "samples": f"{options.rounds} rounds of {options.steps} steps after {options.warmup} "
        "to warm up, all candidates in turns; a step is the median, q1 and q3 the quartiles",
        "processes": "each candidate's own, without the MXNET_*, OMP_* and MALLOC_* set here; one "
        "candidate computes, the others are stopped",
        "data": "one random batch in NumPy, which is loaded and split in every step",
        "loss": f"after the last step; off: from that of {REFERENCE!r}, with batch normalisation "
        f"on several devices from that of {TRAINER!r}, else from their median; more than "
        f"{TOLERANCE:g} is wrong",
    }
    record.header(console, rows)
    for name in options.candidates:
        console.line(f"{name}: {CANDIDATES[name].about}")


def show(console, setting, comparison, rows):
    """Print the table, and which candidates are missing."""
    for line in ["", setting.title, *tables.table(rows)]:
        console.line(line)
    for row in rows:
        if row.name == OURS and row.memory:
            console.line(tables.memory(row))
        if row.version:
            console.line(f"{row.name}: {row.version}")
    for line in comparison.missing():
        console.notice(line)


if __name__ == "__main__":
    sys.exit(main())
