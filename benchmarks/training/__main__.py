"""Measure training steps of gluonpar and other libraries, each in its own process, all in turns.

python -m benchmarks.training --num-gpus 2
python -m benchmarks.training --workload mlp --num-gpus 1,2,4 --device cpu --rounds 6
python -m benchmarks.training --torch-python ~/torch/bin/python --json a.json
python -m benchmarks.training --workload lenet --num-gpus 4 --soak 20000 --plot soak.svg

With --soak, one candidate alone trains that many steps, and the result is whether its process stays
as it was (resident memory, threads, file descriptors, images/s) and its devices have the same
parameters.

Exit code: 0; 1 if a candidate failed, or trained another function than the others, or did not stay
as it was; 2 for a request that cannot be met; 130 after Ctrl-C.
"""

import itertools
import sys

from benchmarks.comparison import TOLERANCE, Comparison
from benchmarks.jobs import Failed, check_python
from benchmarks.training import soak as soaks
from benchmarks.training import soak_chart, tables
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
from gluonpar.diagnostics.benchmark import harness
from gluonpar.runtime import devices

IDLE_CPU = 0.05  # of a core: a candidate that uses more while it waits disturbs the others


def main(argv=None) -> int:
    """Measure what ``argv`` asks for and print it workload by workload; return the exit code."""

    def measure_all(prepared, console, record):
        for notice in prepared[1]:
            console.notice(notice)
        return (compare if record.options.soak is None else soak)(prepared[0], console, record)

    def plot(options, rows):
        soak_chart.draw(options.plot, rows)

    return harness.conduct(parser(), argv, prepare, measure_all, plot)


def parser():
    """Return the options."""
    made = harness.BenchmarkParser(__doc__.partition("\n")[0], "draw the soak")
    made.prog = "benchmarks.training"
    positive, every = {"type": harness.at_least(1), "metavar": "N"}, ",".join(WORKLOADS)
    known = harness.one_of(WORKLOADS)
    made.add("--workload", every, "what to train", type=known, metavar="A,B")
    made.add("--num-gpus", "2", "numbers of devices", type=harness.integers, metavar="K,...")
    help_ = f"what to measure (default: {','.join(CANDIDATES)}; with --soak {OURS})"
    known = harness.one_of(CANDIDATES)
    made.add_argument("--candidates", type=known, metavar="A,B", help=help_)
    help_ = "samples per step, over all devices (default: the workload's)"
    made.add_argument("--batch-size", help=help_, **positive)
    made.add("--steps", 5, "steps per sample", **positive)
    made.add("--rounds", 12, "samples of each candidate", **positive)
    kind = harness.at_least(0)
    made.add("--warmup", 5, "steps before that do not count", type=kind, metavar="N")
    help_ = "train this many steps, and show whether the process stays as it was"
    made.add_argument("--soak", type=int, metavar="N", help=help_)
    for library, package in LIBRARIES.items():
        help_ = f"interpreter that has {package} (default: this one)"
        option = f"--{library}-python"
        made.add_argument(option, metavar="PATH", default=sys.executable, help=help_)
    return made


def prepare(options):
    """Return the settings in turn, and notices on their devices; ValueError if not possible."""
    if options.plot and options.soak is None:
        raise ValueError("--plot needs --soak; --json keeps the figures of a comparison")
    if options.soak is not None:
        soaks.check(options.soak, names(options))
    pythons = {}
    for name in names(options):
        library = name.split()[0]
        if library in LIBRARIES:
            pythons[name] = getattr(options, f"{library}_python")
            check_python(f"--{library}-python", pythons[name])
    chosen = [devices.choose(num_gpus=k, device=options.device) for k in options.num_gpus]
    often = (options.batch_size, options.steps, options.rounds, options.warmup, pythons)
    settings = [Setting(work, choice.ctx, *often) for work in options.workload for choice in chosen]
    return settings, [choice.notice for choice in chosen if choice.notice]


def names(options):
    """Return the candidates."""
    return options.candidates or ([OURS] if options.soak is not None else list(CANDIDATES))


def compare(settings, console, record):
    """Print a table for each setting and one of all; return complaints."""
    header(console, record)
    failed = record.more["failed"] = []
    left_out = record.more["left_out"] = []
    for setting in settings:
        with Comparison() as comparison:
            rows = measure(setting, comparison, names(record.options), harness.progress_bar)
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
        "candidate computes, the others wait",
        "data": "one random batch in NumPy, which is loaded and split in every step",
        "loss": f"after the last step; off: from that of {REFERENCE!r}, with batch normalisation "
        f"on several devices from that of {TRAINER!r}, else from their median; more than "
        f"{TOLERANCE:g} is wrong",
    }
    record.header(console, rows)
    for name in names(options):
        console.line(f"{name}: {CANDIDATES[name].about}")


def show(console, setting, comparison, rows):
    """Print the table, which candidates are missing, and which were not idle while waiting."""
    for line in ["", setting.title, *tables.table(rows)]:
        console.line(line)
    for row in rows:
        if row.name == OURS and row.memory:
            console.line(tables.memory(row))
        if row.version:
            console.line(f"{row.name}: {row.version}")
        if row.idle_cpu > IDLE_CPU:
            console.notice(f"{row.name}: used {row.idle_cpu:.0%} of a core while others trained")
    for line in comparison.missing():
        console.notice(line)


def soak(settings, console, record):
    """Print how each candidate's process changed in each setting; return complaints."""
    record.header(console, {})
    failed = record.more["failed"] = []
    for setting, name in itertools.product(settings, names(record.options)):
        bar = harness.progress_bar(f"{name}, {setting.title}")
        try:
            result = soaks.soak(setting, record.options.soak, name, bar)
        except Failed as how:
            failed.append(f"failed: {name} on {setting.title}: {how}")
        else:
            record.rows.append(result)
            for line in tables.soaked(result):
                console.line(line)
        record.write()
    return failed + [
        f"{result.title}: {complaint}"
        for result in record.rows
        for complaint in result.complaints.values()
    ]


if __name__ == "__main__":
    sys.exit(main())
