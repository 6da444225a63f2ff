"""Measure training steps of gluonpar and other libraries, each in its own process, all in turns.

python -m benchmarks.training --num-gpus 2
python -m benchmarks.training --workload mlp --num-gpus 1,2,4 --device cpu --rounds 6
python -m benchmarks.training --torch-python ~/torch/bin/python --json a.json

Exit code: 0; 1 if a candidate failed, or trained another function than the others; 2 for a request
that cannot be met; 130 after Ctrl-C.
"""

import contextlib
import sys

from benchmarks.jobs import TOLERANCE, Comparison
from benchmarks.options import integers, one_of
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
from gluonpar.runtime import devices


def main(argv=None) -> int:
    """Measure what ``argv`` asks for and print it workload by workload; return the exit code."""
    return harness.conduct(parser(), argv, prepare, compare)


def parser():
    """Return the options."""
    made = harness.BenchmarkParser(__doc__.partition("\n")[0], prog="benchmarks.training")
    positive, every = {"type": harness.at_least(1), "metavar": "N"}, ",".join(WORKLOADS)
    known = one_of(WORKLOADS)
    made.add("--workload", every, "what to train", type=known, metavar="A,B")
    made.add("--num-gpus", "2", "numbers of devices", type=integers, metavar="K,...")
    known = one_of(CANDIDATES)
    made.add("--candidates", ",".join(CANDIDATES), "what to measure", type=known, metavar="A,B")
    help_ = "samples per step, over all devices (default: the workload's)"
    made.add_argument("--batch-size", help=help_, **positive)
    made.add("--steps", 5, "steps per sample", **positive)
    made.add("--rounds", 12, "samples of each candidate", **positive)
    kind = harness.at_least(0)
    made.add("--warmup", 5, "steps before that do not count", type=kind, metavar="N")
    help_ = "settings take turns in each round, so that a machine's drift is in all of them alike"
    made.add_argument("--interleave", action="store_true", help=help_)
    for library, package in LIBRARIES.items():
        help_ = f"interpreter that has {package} (default: this one)"
        option = f"--{library}-python"
        made.add_argument(option, metavar="PATH", default=sys.executable, help=help_)
    return made


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
