#!/usr/bin/env python
"""Measure sums and steps of several processes beside Horovod and MXNet's dist_sync; predict more.

python -m benchmarks.cluster
python -m benchmarks.cluster --processes 2 --horovod-python ~/hvd/bin/python --json out.json
python -m benchmarks.cluster --latency-us 25 --gbit 10     # predict for this network

All candidates' processes are alive at once, on this machine; one candidate is asked, in turns, and
the others' are stopped meanwhile.

Exit code: 0; 1 if a sum was wrong, a loss another than the others', or a candidate failed; 2 for a
request that cannot be met; 130 after Ctrl-C.
"""

import sys

try:
    from benchmarks.cluster import chart, contest, model, tables
    from benchmarks.cluster.jobs import CANDIDATES, Asked
    from benchmarks.training import process
    from gluonpar.diagnostics.benchmark import options
    from gluonpar.runtime import threads
    from gluonpar.runtime.version import __version__
except ImportError as error:
    remedy = " (in a clone: pip install -e '.[cpu,mpi]')" if error.name == "gluonpar" else ""
    print(f"bench_cluster.py: error: {error}{remedy}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

SIZES = "256,16384,262144,11000000"  # float32: 1 KiB, 64 KiB, 1 MiB and 44 MB
LENET_BYTES = 4 * 129_068


def main(argv=None) -> int:
    """Measure what ``argv`` asks for and print it; the exit code."""

    def plot(options, rows):
        chart.draw(options.plot, rows, threads.cores())

    return options.conduct(parser(), argv, run, plot)


def parser() -> options.Parser:
    """The options."""
    made = options.Parser(__doc__.partition("\n")[0], "draw times and the model", on_devices=False)
    made.add("--processes", "1,2,4", "how many", type=options.numbers, metavar="P,...")
    help_ = "float32 in the arrays that are summed"
    made.add("--sizes", SIZES, help_, type=options.numbers, metavar="N,...")
    every, known = ",".join(CANDIDATES), options.among(CANDIDATES)
    made.add("--candidates", every, "who is measured", type=known, metavar="A,B")
    made.add("--batch-size", 256, "images a step, over all processes", type=int, metavar="N")
    made.add("--steps", 5, "steps a sample", type=int, metavar="N")
    made.add("--rounds", 12, "samples of each candidate", type=int, metavar="N")
    made.add_argument("--horovod-python", metavar="PATH", help="interpreter that has Horovod")
    help_ = "predict for a network of this latency, in microseconds (default: as fitted)"
    made.add_argument("--latency-us", type=float, metavar="T", help=help_)
    help_ = "and of this bandwidth, in Gbit/s (default: as fitted)"
    made.add_argument("--gbit", type=float, metavar="B", help=help_)
    help_ = "predict for this much computation a step (default: the floor's, measured)"
    made.add_argument("--compute-ms", type=float, metavar="T", help=help_)
    help_ = "predict for so many bytes of gradients; LeNet's are"
    made.add("--model-bytes", LENET_BYTES, help_, type=int, metavar="N")
    return made


def run(made, console, record):
    """Extend the record by the rows of each number of processes; what was wrong."""
    options = record.options
    with made.requests():
        check(options)
        record.keep()
    header(console, record)
    cores, failed = threads.cores(), []
    for number in options.processes:
        asked = Asked(number, options.batch_size, options.horovod_python, cores)
        with contest.Contest(asked) as held:
            new = hold(held, options)
        show(console, options, held, new)
        record.rows += new
        failed += [f"{name} on {number} processes" for name in held.failed]
        record.keep()
    for line in prediction(options, record.rows, cores):
        console.line(line)
    wrong = [f"{row.name} on {row.processes} processes" for row in record.rows if row.wrong]
    lines = [f"wrong sums, or another loss than the others': {'; '.join(wrong)}"] if wrong else []
    return lines + ([f"failed: {'; '.join(failed)}"] if failed else [])


def check(options) -> None:
    """Raise ValueError for what cannot be asked."""
    for name in ("processes", "sizes"):
        for value in getattr(options, name):
            if value < 1:
                raise ValueError(f"{name}={value}; need at least 1")
    for name in ("steps", "rounds"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)}; need at least 1")
    most = max(options.processes)
    if options.batch_size < most:
        raise ValueError(
            f"batch_size={options.batch_size} leaves some of {most} processes without an image; "
            "give at least one each"
        )
    for name in ("latency_us", "gbit", "compute_ms", "model_bytes"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value}; need a number that is not negative")
    if options.gbit == 0:
        raise ValueError("gbit=0.0 carries nothing; give the network's bandwidth")
    if options.horovod_python:
        process.check_python("horovod_python", options.horovod_python)


def hold(held, options):
    """Start all jobs, let them run in turns, and return their rows."""
    for name in options.progress_bar(desc="starting", unit="job")(options.candidates):
        held.start(name)
    bar = options.progress_bar(desc=f"{held.asked.processes} processes", unit="round")
    held.measure(options.sizes, options.steps, options.rounds, bar)
    return held.rows()


def header(console, record):
    """Print what the figures depend on and what they mean."""
    machine, options = record.machine, record.options
    console.header(
        __version__,
        {
            "machine": options.processor(machine),
            "date": machine["date"],
            "samples": f"{options.rounds} rounds, all candidates in turns; the median, iqr the "
            "interquartile range, of the slowest rank from a barrier on",
            "all-reduce": "of one float32 array a process, in host memory, to all processes",
            "training": f"LeNet, {options.steps} steps a sample on {options.batch_size} images a "
            "step over all processes, cores / processes threads each",
            "lo": "what the loopback network carried meanwhile, a process; shared memory is none",
        },
    )
    for name in options.candidates:
        console.line(f"{name}: {CANDIDATES[name].about}")


def show(console, options, held, rows):
    """Print the tables of so many processes, and who is missing and why."""
    number = held.asked.processes
    console.line(f"\n{number} process{'es' if number > 1 else ''}")
    for line in tables.sums(rows, options.sizes) if number > 1 else []:
        console.line(line)
    for line in tables.steps(rows):
        console.line(line)
    for name, reason in held.left_out.items():
        console.notice(f"left out: {name}: {reason}")
    for name, how in held.failed.items():
        console.notice(f"failed: {name}: {how}")


def prediction(options, rows, cores):
    """The model fitted to our all-reduces, and what it predicts; or why there is none."""
    points = tables.points(rows, cores)
    if not points:
        return []
    try:
        found = model.fit(points)
    except ValueError as error:
        return [f"\nno model: {error}"]
    network = found._replace(
        **({} if options.latency_us is None else {"latency_seconds": options.latency_us / 1e6}),
        **({} if options.gbit is None else {"bytes_per_second": options.gbit * 1e9 / 8}),
    )
    lines = ["", *tables.fitted(found, points)]
    compute = (
        tables.compute_seconds(rows) if options.compute_ms is None else options.compute_ms / 1e3
    )
    if compute is None:
        return [*lines, "no prediction: the floor was not measured; give --compute-ms"]
    return [*lines, *tables.predicted(network, compute, options.model_bytes)]


if __name__ == "__main__":
    sys.exit(main())
