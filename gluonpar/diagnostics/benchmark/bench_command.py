"""gluonpar bench: measure the all-reduce algorithms beside MXNet's kvstore and a NumPy floor.

The figures are those of nccl-tests. With --links, measure the links between the devices instead.
"""

from __future__ import annotations

import argparse
import functools
import re
from typing import Sequence

from gluonpar import collectives
from gluonpar.collectives import drawing
from gluonpar.diagnostics.benchmark import allreduce, bench_links, harness
from gluonpar.install import entry
from gluonpar.runtime import devices, threads
from gluonpar.training.console import Console

EXAMPLES = """
gluonpar bench --num-gpus 2
gluonpar bench --num-gpus 4 --device cpu --min-bytes 64K --factor 4
gluonpar bench --algorithms host,ring --json bench.json --plot bench.png
gluonpar bench --links --num-gpus 4 --json links.json --plot links.png
"""
PEER, FLOOR = allreduce.PEER, allreduce.FLOOR
HEADINGS = ("bytes", "elements", "candidate", "time us", "iqr us", "algbw GB/s", "busbw GB/s")
HEADINGS += (f"/ {PEER}", f"/ {FLOOR}", "#wrong")
WIDTHS = (11, 10, -18, 10, 9, 10, 10, 14, 7, 7)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Measure what ``argv`` asks for and print it size by size; return the exit code.

    ``prog`` is the program's name in messages (default: the script's).
    """
    made = parser(prog)
    if made.parse_args(argv).links:
        prepare_links = functools.partial(bench_links.prepare, defaults=made.parse_args([]))
        return harness.conduct(made, argv, prepare_links, bench_links.measure, bench_links.plot)
    return harness.conduct(made, argv, prepare, measure, plot)


def parser(prog: str | None) -> harness.BenchmarkParser:
    """Return the options, named as in nccl-tests."""
    more = {"prog": prog, "examples": EXAMPLES}
    made = harness.BenchmarkParser(
        entry.about(__doc__), "draw busbw over bytes, or with --links heat maps", **more
    )
    size, count = {"type": num_bytes, "metavar": "SIZE"}, {"metavar": "N"}
    made.add("--min-bytes", "4K", "smallest array of one device, such as 4096 or 4K", **size)
    made.add("--max-bytes", "64M", "largest array, or the copies of --links", **size)
    made.add("--factor", 8, "ratio of one size to the one before", type=int, **count)
    made.add("--num-gpus", 2, "number of devices", type=int, metavar="K")
    made.add("--dtype", "float32", "of the arrays", choices=allreduce.DTYPES)
    made.add("--op", "sum", "how arrays are combined", choices=list(allreduce.COMBINE))
    made.add("--iters", 20, "samples", type=harness.at_least(1), dest="rounds", **count)
    often = "calls on the same arrays before the wait; a sample is one call's share"
    made.add("--calls", 1, often, type=harness.at_least(1), **count)
    made.add("--warmup", 5, "samples before that do not count", type=harness.at_least(0), **count)
    made.add("--check", 1, "compare every value with NumPy's", type=int, choices=(0, 1))
    known = harness.one_of(collectives.ALGORITHMS)
    text = "gluonpar's algorithms to measure (default: all that these devices can use)"
    made.add_argument("--algorithms", metavar="A,B", type=known, help=text)
    text = "measure latency and bandwidth between each two devices; simulate reads the --json file"
    made.add_argument("--links", action="store_true", help=text)
    return made


def num_bytes(text: str) -> int:
    """Convert 4096, 4K, 64M or 1G to a number."""
    match = re.fullmatch(r"(\d{1,20})([KMG]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"must be a size such as 4096, 4K, 64M or 1G, got {text!r}"
        )
    return int(match[1]) << 10 * " KMG".index(match[2] or " ")


def prepare(options: argparse.Namespace) -> tuple:
    """Return sizes, setting, candidates, why others are left out, and a notice on the devices."""
    sizes = allreduce.sizes(options.min_bytes, options.max_bytes, options.factor, options.dtype)
    chosen = devices.choose(num_gpus=options.num_gpus, device=options.device)
    how = (options.dtype, options.op, options.rounds, options.warmup, bool(options.check))
    setting = allreduce.Setting(chosen.ctx, *how, options.calls)
    algorithms = options.algorithms or collectives.usable(chosen.ctx)
    found = allreduce.makers(chosen.ctx, algorithms)
    return sizes, setting, *allreduce.without_unsupported(found, setting), chosen.notice


def measure(prepared: tuple, console: Console, record: harness.Record) -> list[str]:
    """Print a table size by size; return a complaint if there were wrong values."""
    sizes, setting, found, left_out, notice = prepared
    record.more["left_out"] = left_out
    reasons = [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    for text in filter(None, [notice, *reasons]):
        console.notice(text)
    header(console, record, setting)
    for size in sizes:
        bar = harness.progress_bar(f"{size} elements")
        rows = allreduce.measure_size(found, setting, size, bar)
        console.line("" if record.rows else "\n" + harness.columns(HEADINGS, WIDTHS))
        seconds = {row.name: row.samples.median for row in rows}
        for row in rows:
            console.line(harness.columns(cells(row, seconds), WIDTHS))
        record.rows += rows
        record.write()
    wrong = [f"{row.name} at {row.num_bytes} bytes" for row in record.rows if row.wrong]
    return [f"wrong values: {', '.join(wrong)}"] if wrong else []


def header(console: Console, record: harness.Record, setting: allreduce.Setting) -> None:
    """Print what the figures depend on and what they mean."""
    how = threads.describe(setting.ctx) or "; ".join(record.machine["gpus"])
    checked = "every value compared with NumPy's" if setting.check else "values not checked"
    rows = {
        "devices": f"{list(setting.ctx)}, {how}",
        FLOOR: f"NumPy on the same memory, {allreduce.FLOOR_THREADS} threads from "
        f"{allreduce.FLOOR_MIN_BYTES} bytes up",
        "all-reduce": f"{setting.op} of {setting.dtype}, {checked}",
        "calls": f"{setting.calls} before each wait; times are per call",
        "samples": f"{setting.rounds} rounds after {setting.warmup} to warm up, all candidates in "
        "turns; time is the median, iqr the interquartile range",
        "ratios": f"of times to those of {PEER} and {FLOOR}: below 1 is faster",
    }
    record.header(console, rows)


def cells(row: allreduce.Result, seconds: dict[str, float]) -> tuple:
    """Return a line of the table; ``seconds`` are all candidates' medians."""
    time, spread = row.samples.median, row.samples.spread
    ratios = [f"{time / seconds[to]:.2f}" if to in seconds else "-" for to in (PEER, FLOOR)]
    figures = (f"{1e6 * time:.1f}", f"{1e6 * spread:.1f}", f"{row.algbw:.3f}", f"{row.busbw:.3f}")
    wrong = "-" if row.wrong is None else row.wrong
    return (row.num_bytes, row.elements, row.name, *figures, *ratios, wrong)


def plot(options: argparse.Namespace, rows: Sequence[allreduce.Result]) -> None:
    """Draw busbw over bytes, a line for each candidate, with its name at the end; most are grey."""
    title = f"all-reduce: {options.op} of {options.dtype} over {rows[0].num_devices} devices"
    chosen = {"host": 0, "ring": 1, "kvstore": 6, PEER: 6, FLOOR: 2}
    colours = {name: drawing.COLOURS[i] for name, i in chosen.items()}
    with drawing.style(title):
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator

        figure, ends = Figure(figsize=(9, 5)), []
        axes = figure.add_axes((0.08, 0.11, 0.77, 0.81))
        names = dict.fromkeys(row.name for row in rows)
        for name in sorted(names, key=colours.__contains__):  # those in colour on top
            points = [(row.num_bytes, row.busbw) for row in rows if row.name == name]
            colour, width = colours.get(name, drawing.GREY), 2 if name in colours else 0.8
            line = "o--" if name == PEER else "o-"
            axes.plot(*zip(*points), line, color=colour, linewidth=width, markersize=2 * width)
            ends.append((points[-1][1], name, colour))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log" if rows[0].busbw else "linear")  # one device has no bus
        sizes = sorted({row.num_bytes for row in rows})
        units = [min((size.bit_length() - 1) // 10, 3) for size in sizes]
        labels = [f"{n >> 10 * u}{['', 'K', 'M', 'G'][u]}" for n, u in zip(sizes, units)]
        axes.set_xticks(sizes, labels)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="bytes of one device's array", ylabel="busbw, GB/s: higher is better")
        axes.set_title(f"{title}, medians", loc="left")
        axes.margins(x=0.02)
        drawing.label_ends(axes, ends)
        names = ", ".join(name for _, name, _ in sorted(ends, reverse=True))
        drawing.save(figure, options.plot, title, f"At the largest size, fastest first: {names}.")
