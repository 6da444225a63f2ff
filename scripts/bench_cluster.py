#!/usr/bin/env python
"""Measure sums and steps of several processes beside Horovod and MXNet's dist_sync; predict more.

python scripts/bench_cluster.py
python scripts/bench_cluster.py --processes 1,2,4 --horovod-python ~/hvd/bin/python --json out.json
python scripts/bench_cluster.py --latency-us 25 --gbit 10     # predict for this network

Exit code: 0; 1 if any sum was wrong; 2 for a request that cannot be met; 130 after Ctrl-C.
"""

import argparse
import statistics
import sys

try:
    from gluonpar import bench_cli, measure, report
    from gluonpar.bench_cluster import jobs, model
    from gluonpar.version import __version__
except ImportError as error:
    remedy = " (in a clone: pip install -e '.[cpu,mpi]')" if error.name == "gluonpar" else ""
    print(f"bench_cluster.py: error: {error}{remedy}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

MODEL_BYTES = 4 * 1_000_000  # the gradients in the prediction, as of a model of a million
WIDTHS = (-10, 4, 11, 10, 10, 10)


def parser():
    """The options."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--processes", type=bench_cli.numbers, default=[1, 2, 4], metavar="P,P")
    made.add_argument("--sizes", type=bench_cli.numbers, default=[1024, 131072, 11_000_000])
    made.add_argument("--rounds", type=int, default=10, metavar="N")
    made.add_argument("--horovod-python", metavar="FILE", help="a Python that has Horovod")
    made.add_argument("--latency-us", type=float, help="of the network to predict for")
    made.add_argument("--gbit", type=float, help="its bandwidth, in Gbit/s")
    made.add_argument("--model-bytes", type=int, default=MODEL_BYTES, help="of gradients")
    made.add_argument("--json", metavar="FILE", help="write all samples to this file")
    return made


def main(argv=None) -> int:
    """Measure what ``argv`` asks for, print it, fit and predict; the exit code."""
    options, console = parser().parse_args(argv), report.Console()
    machine, rows = measure.machine(), []
    console.header(__version__, {"machine": bench_cli.processor(machine), "date": machine["date"]})
    console.line("median of the all-reduce of so many float32, and of LeNet's step on 128 images a")
    console.line("process; interquartile range beside it; one thread a process")
    heads = ("candidate", "P", "elements", "ms", "iqr ms", "GB/s")
    console.line(bench_cli.columns(heads, WIDTHS))
    for num_processes in options.processes:
        for name, start in jobs.CANDIDATES.items():
            if num_processes == 1 and name != "gluonpar":
                continue
            try:
                rows.append(start(num_processes, options.sizes, options.rounds, vars(options)))
            except jobs.Unable as reason:
                console.notice(f"left out: {name} on {num_processes}: {reason}")
                continue
            table(console, rows[-1])
    if options.json:
        measure.write_json(options.json, {"machine": machine, "rows": rows})
    predict(console, options, rows)
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        console.notice(f"bench_cluster.py: {wrong} sums were wrong")
    return bench_cli.WRONG if wrong else bench_cli.MEASURED


def table(console, row) -> None:
    """One candidate's lines."""
    p = row["processes"]
    for n, seconds in row["seconds"].items():
        median, spread = figures(seconds)
        rate = f"{model.sent_bytes(p, 4 * int(n)) / median / 1e9:.2f}" if p > 1 else ""
        cells = (row["kind"], p, n, f"{1e3 * median:.3f}", f"{1e3 * spread:.3f}", rate)
        console.line(bench_cli.columns(cells, WIDTHS))
    if "step_seconds" in row:
        median, spread = figures(row["step_seconds"])
        cells = (row["kind"], p, "LeNet step", f"{1e3 * median:.2f}", f"{1e3 * spread:.2f}", "")
        console.line(bench_cli.columns(cells, WIDTHS))


def figures(seconds):
    """Median and interquartile range."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return median, high - low


def predict(console, options, rows) -> None:
    """Fit the model to ours, and say what it predicts on 8 to 1024 processes."""
    ours = [row for row in rows if row["kind"] == "gluonpar"]
    points = [
        (row["processes"], 4 * int(n), statistics.median(seconds))
        for row in ours
        for n, seconds in row["seconds"].items()
        if row["processes"] > 1
    ]
    try:
        fitted = model.fit(points)
    except ValueError as error:
        console.notice(f"no model: {error}")
        return
    errors = [model.allreduce_seconds(p, n, fitted) / s - 1 for p, n, s in points]
    console.line(
        f"fitted: latency {1e6 * fitted.latency_seconds:.0f} us, "
        f"{fitted.bytes_per_second / 1e9:.2f} GB/s; off by {min(errors):+.0%} to {max(errors):+.0%}"
    )
    network = model.Network(
        fitted.latency_seconds if options.latency_us is None else options.latency_us / 1e6,
        fitted.bytes_per_second if options.gbit is None else options.gbit * 1e9 / 8,
    )
    alone = [row["step_seconds"] for row in ours if row["processes"] == 1]
    compute = statistics.median(alone[0] if alone else ours[0]["step_seconds"])
    console.line(
        f"predicted, {options.model_bytes} bytes of gradients, {1e3 * compute:.1f} ms of "
        f"computation, latency {1e6 * network.latency_seconds:.0f} us, "
        f"{network.bytes_per_second / 1e9:.2f} GB/s:"
    )
    for p in (8, 16, 32, 64, 128, 256, 512, 1024):
        best, worst = model.step_seconds(p, compute, options.model_bytes, network)
        console.line(
            f"{p:6d} processes: {1e3 * best:7.1f} to {1e3 * worst:7.1f} ms a step, "
            f"{p * compute / worst:6.0f} to {p * compute / best:6.0f} times one process"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
