#!/usr/bin/env python
"""Measure a training step beside its peers, each in its own process, all in turns.

python -m benchmarks.training --num-gpus 2
python -m benchmarks.training --workload mlp --num-gpus 1,2,4 --device cpu --rounds 6
python -m benchmarks.training --torch-python ~/torch/bin/python --json a.json --plot a.png
python -m benchmarks.training --workload lenet --num-gpus 4 --soak 20000 --plot soak.svg

With --soak, gluonpar alone trains so many steps, and what is shown is whether its process stays as
it was: resident memory, threads, file descriptors, images/s; and whether its devices stay alike.

Exit code: 0; 1 if a candidate died, or trained another function than the others, or did not stay as
it was; 2 for a request that cannot be met; 130 after Ctrl-C.
"""

import itertools
import sys

try:
    from benchmarks.training import chart, contest, panels, process, tables
    from benchmarks.training import soak as soaks
    from benchmarks.training.candidates import (
        CANDIDATES,
        HOROVOD,
        OURS,
        REFERENCE,
        TORCH,
        TRAINER,
        Setting,
    )
    from benchmarks.training.workloads import WORKLOADS
    from gluonpar.diagnostics.benchmark import options
    from gluonpar.runtime import devices
    from gluonpar.runtime.version import __version__
except ImportError as error:
    remedy = " (in a clone: pip install -e '.[cpu]')" if error.name == "gluonpar" else ""
    print(f"bench_training.py: error: {error}{remedy}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

IDLE_CPU = 0.05  # of a core: more than this, burnt while waiting, disturbs the others


def main(argv=None) -> int:
    """Measure what ``argv`` asks for and print it workload by workload; the exit code."""

    def plot(options, rows):
        draw = chart.draw if options.soak is None else panels.draw
        draw(options.plot, rows)

    return options.conduct(parser(), argv, run, plot)


def parser() -> options.Parser:
    """The options."""
    made = options.Parser(__doc__.partition("\n")[0], "draw ms/step, or the soak")
    every, known = ",".join(WORKLOADS), options.among(WORKLOADS)
    made.add("--workload", every, "what to train", type=known, metavar="A,B")
    made.add("--num-gpus", "2", "numbers of devices", type=options.numbers, metavar="K,...")
    help_ = f"who is measured (default: {','.join(CANDIDATES)}; with --soak {OURS})"
    known = options.among(CANDIDATES)
    made.add_argument("--candidates", type=known, metavar="A,B", help=help_)
    help_ = "samples a step, over all devices (default: the workload's)"
    made.add_argument("--batch-size", type=int, metavar="N", help=help_)
    made.add("--steps", 5, "steps a sample", type=int, metavar="N")
    made.add("--rounds", 12, "samples of each candidate", type=int, metavar="N")
    made.add("--warmup", 5, "steps before, that do not count", type=int, metavar="N")
    help_ = "instead, train this many steps and show whether the process stays as it was"
    made.add_argument("--soak", type=int, metavar="N", help=help_)
    for name, package in ((TORCH, "PyTorch"), (HOROVOD, "Horovod")):
        help_ = f"interpreter that has {package} (default: this one)"
        option = f"--{name.split()[0]}-python"
        made.add_argument(option, metavar="PATH", default=sys.executable, help=help_)
    return made


def run(made, console, record):
    """Extend the record workload by workload; exit if the request cannot be met; what was wrong."""
    with made.requests():
        settings, notices = request(record.options)
        record.keep()
    for notice in notices:
        console.notice(notice)
    if record.options.soak is not None:
        return soak(settings, console, record)
    return compare(settings, console, record)


def request(options):
    """The settings in turn, and notices on their devices; ValueError if they cannot be had."""
    if options.soak is not None:
        soaks.check(options.soak, names(options))
    pythons = {TORCH: options.torch_python, HOROVOD: options.horovod_python}
    for name in set(pythons) & set(names(options)):
        process.check_python(f"{name.split()[0]}_python", pythons[name])
    chosen = [devices.choose(num_gpus=k, device=options.device) for k in options.num_gpus]
    settings = [
        Setting(
            workload,
            choice.ctx,
            options.batch_size,
            options.steps,
            options.rounds,
            options.warmup,
            pythons,
        )
        for workload in options.workload
        for choice in chosen
    ]
    return settings, [choice.notice for choice in chosen if choice.notice]


def names(options):
    """Who trains."""
    return options.candidates or ([OURS] if options.soak is not None else list(CANDIDATES))


def compare(settings, console, record):
    """Print a table for each setting and one of all; what was wrong."""
    header(console, record)
    failed = record.more["failed"] = []
    left_out = record.more["left_out"] = []
    for setting in settings:
        with contest.Contest(setting) as held:
            new = hold(held, names(record.options))
        show(console, held, new)
        record.rows += new
        failed += [[setting.title, *failure] for failure in held.failed.items()]
        left_out += [[setting.title, *left] for left in held.left_out.items()]
        record.keep()
    if len(settings) > 1:
        for line in ["", *tables.summary(record.rows), *tables.growth(record.rows)]:
            console.line(line)
    wrong = [f"{row.name} on {row.setting.title}" for row in record.rows if row.wrong]
    lines = [f"another loss than the others': {'; '.join(wrong)}"] if wrong else []
    dead = [f"{name} on {title}" for title, name, _ in failed]
    return lines + ([f"failed: {'; '.join(dead)}"] if dead else [])


def hold(held, candidates):
    """Start all candidates, let them train in turns, and return their rows."""
    for name in options.progress_bar(desc="starting", unit="process")(candidates):
        held.start(name)
    held.measure(options.progress_bar(desc=held.setting.title, unit="round"))
    return held.rows()


def header(console, record):
    """Print what the figures depend on and what they mean."""
    machine, options = record.machine, record.options
    console.header(
        __version__,
        {
            "machine": options.processor(machine),
            "date": machine["date"],
            "samples": f"{options.rounds} rounds of {options.steps} steps after {options.warmup} "
            "to warm up, all candidates in turns; a step is the median, iqr the "
            "interquartile range",
            "processes": "one a candidate, without the MXNET_*, OMP_* and MALLOC_* set here; one "
            "computes, the others wait",
            "data": "one random batch in NumPy, which each loads and splits in every step",
            "loss": f"after the last step; off: from that of {REFERENCE!r}, where shards are "
            f"normalised each by itself from that of {TRAINER!r}, else from their median; more "
            f"than {contest.TOLERANCE:g} is wrong",
        },
    )
    for name in names(options):
        console.line(f"{name}: {CANDIDATES[name].about}")


def show(console, held, rows):
    """Print the table, who is missing and why, and who was not idle when it should have been."""
    for line in ["", held.setting.title, *tables.table(rows)]:
        console.line(line)
    for row in rows:
        if row.name == OURS and row.memory:
            console.line(tables.memory(row))
        if row.version:
            console.line(f"{row.name}: {row.version}")
        if row.idle_cpu > IDLE_CPU:
            console.notice(f"{row.name}: burnt {row.idle_cpu:.0%} of a core while others trained")
    for name, reason in held.left_out.items():
        console.notice(f"left out: {name}: {reason}")
    for name, how in held.failed.items():
        console.notice(f"failed: {name}: {how}")


def soak(settings, console, record):
    """Print whether each candidate's process stays as it was on each setting; what was wrong."""
    machine = record.machine
    console.header(__version__, {"machine": options.processor(machine), "date": machine["date"]})
    failed = record.more["failed"] = []
    for setting, name in itertools.product(settings, names(record.options)):
        bar = options.progress_bar(desc=f"{name}, {setting.title}", unit="sample")
        try:
            result = soaks.soak(setting, record.options.soak, name, bar)
        except process.Died as how:
            failed.append(f"failed: {name} on {setting.title}: {how}")
        else:
            record.rows.append(result)
            for line in tables.soaked(result):
                console.line(line)
        record.keep()
    return failed + [
        f"{result.title}: {complaint}"
        for result in record.rows
        for complaint in result.complaints.values()
    ]


if __name__ == "__main__":
    sys.exit(main())
