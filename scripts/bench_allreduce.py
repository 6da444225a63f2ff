#!/usr/bin/env python
"""Measure the all-reduce algorithms beside MXNet's kvstore and a NumPy floor, as nccl-tests does.

python scripts/bench_allreduce.py --num-gpus 2
python scripts/bench_allreduce.py --num-gpus 4 --device cpu --min-bytes 64K --factor 4
python scripts/bench_allreduce.py --algorithms host,ring --json bench.json --plot bench.png

Exit code: 0; 1 if any value was wrong; 2 for a request that cannot be met; 130 after Ctrl-C.
"""

import argparse
import itertools
import re
import sys

try:
    from gluonpar import collectives
    from gluonpar.collectives import checks, drawing, registry
    from gluonpar.diagnostics.benchmark import options
    from gluonpar.diagnostics.benchmark.allreduce import candidates, contest
    from gluonpar.runtime import devices, threads
    from gluonpar.runtime.version import __version__
except ImportError as error:
    remedy = " (in a clone: pip install -e '.[cpu]')" if error.name == "gluonpar" else ""
    print(f"bench_allreduce.py: error: {error}{remedy}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

PEER, FLOOR = candidates.PEER, candidates.FLOOR
HEADINGS = ("bytes", "elements", "candidate", "time us", "iqr us", "algbw GB/s", "busbw GB/s")
HEADINGS += (f"/ {PEER}", f"/ {FLOOR}", "#wrong")
WIDTHS = (11, 10, -18, 10, 9, 10, 10, 14, 7, 7)
THEIRS = {PEER: "^--", "mxnet local": "v:", FLOOR: "s-"}  # grey, by marker and line
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main(argv=None) -> int:
    """Measure what ``argv`` asks for and print it size by size; the exit code."""
    return options.conduct(parser(), argv, run, plot)


def run(made, console, record):
    """Extend the record size by size; exit if the request cannot be met; what was wrong."""
    options = record.options
    with made.requests():
        sizes = contest.sizes(options.min_bytes, options.max_bytes, options.factor, options.dtype)
        setting, notice = request(options)
        found = candidates.makers(setting.ctx, options.algorithms)
        found, left_out = contest.split_off_unable(found, setting)
        record.more["left_out"] = left_out
        record.keep()
    reasons = [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    for text in filter(None, [notice, *reasons]):
        console.notice(text)
    header(console, record.machine, setting)
    for size in sizes:
        bar = options.progress_bar(desc=f"{size} elements", unit="round")
        new = contest.measure_size(found, setting, size, bar)
        table(console, new, first=not record.rows)
        record.rows += new
        record.keep()
    return wrong_values(record.rows)


def parser() -> options.Parser:
    """The options, by nccl-tests' names."""
    made = options.Parser(__doc__.partition("\n")[0], "draw busbw over bytes")
    size = {"type": num_bytes, "metavar": "SIZE"}
    made.add("--min-bytes", "4K", "the smallest array of one device, such as 4096 or 4K", **size)
    made.add("--max-bytes", "64M", "the largest", **size)
    made.add("--factor", 8, "from one size to the next", type=int, metavar="N")
    made.add("--num-gpus", 2, "number of devices", type=int, metavar="K")
    made.add("--dtype", "float32", "of the arrays", choices=contest.DTYPES)
    made.add("--op", "sum", "how arrays are combined", choices=checks.OPS)
    made.add("--iters", 20, "rounds that count", type=int, metavar="N", dest="rounds")
    made.add("--warmup", 5, "rounds before, that do not", type=int, metavar="N")
    help_ = "whether to compare every value with NumPy's"
    made.add("--check", 1, help_, type=int, choices=(0, 1))
    every = ",".join(collectives.ALGORITHMS)
    made.add("--algorithms", every, "gluonpar's to be measured", metavar="A,B", type=names)
    return made


def num_bytes(text: str) -> int:
    """The number that 4096, 4K, 64M or 1G stands for."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 4096, 4K, 64M or 1G")
    return int(match[1]) * UNITS[match[2]]


def names(text: str) -> list:
    """Algorithms that there are."""
    try:
        return [registry.named(name).name for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def request(options):
    """The setting and a notice on its devices; ValueError if it cannot be had."""
    chosen = devices.choose(num_gpus=options.num_gpus, device=options.device)
    setting = contest.Setting(
        chosen.ctx, options.dtype, options.op, options.rounds, options.warmup, bool(options.check)
    )
    threads.share(chosen.ctx)
    return setting, chosen.notice


def header(console, machine, setting):
    """Print what the figures depend on and what they mean."""
    of = setting.ctx
    how = threads.describe(of) or "; ".join(machine["gpus"])
    checked = "every value compared with NumPy's" if setting.check else "values not checked"
    console.header(
        __version__,
        {
            "machine": options.processor(machine),
            "date": machine["date"],
            "devices": f"{list(of)}, {how}",
            FLOOR: f"NumPy on the same memory, {candidates.floor_threads()} threads from "
            f"{candidates.FLOOR_ALONE} bytes up",
            "all-reduce": f"{setting.op} of {setting.dtype}, {checked}",
            "samples": f"{setting.rounds} rounds after {setting.warmup} to warm up, all candidates "
            "in turns; time is the median, iqr the interquartile range",
            "ratios": f"of times to those of {PEER} and {FLOOR}: below 1 is faster",
        },
    )


def table(console, rows, first):
    """Print a line for each row, under the headings if these are the first."""
    console.line("\n" + options.columns(HEADINGS, WIDTHS) if first else "")
    seconds = {row.name: row.samples.median for row in rows}
    for row in rows:
        time, spread = row.samples.median, row.samples.spread
        ratios = [f"{time / seconds[to]:.2f}" if to in seconds else "-" for to in (PEER, FLOOR)]
        figures = (f"{1e6 * time:.1f}", f"{1e6 * spread:.1f}", f"{row.algbw:.3f}")
        wrong = "-" if row.wrong is None else row.wrong
        cells = (row.num_bytes, row.elements, row.name, *figures, f"{row.busbw:.3f}", *ratios)
        console.line(options.columns((*cells, wrong), WIDTHS))


def plot(options, rows):
    """Draw busbw over bytes, a line for each candidate; the fastest at the end is named first."""
    what = f"{options.op} of {options.dtype} over {rows[0].num_devices} devices"
    title = f"all-reduce: {what}"
    with drawing.style(title):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        lines = draw(axes, rows)
        axes.set_title(title)
        words = ", ".join(line.get_label() for line in lines)
        drawing.save(figure, options.plot, title, f"At the largest size, fastest first: {words}.")


def draw(axes, rows):
    """The lines of all candidates, fastest at the end first."""
    from matplotlib.ticker import LogFormatter

    colours = itertools.cycle(drawing.COLOURS)
    for name in dict.fromkeys(row.name for row in rows):
        style, color = (THEIRS[name], drawing.GREY) if name in THEIRS else ("o-", next(colours))
        mine = [row for row in rows if row.name == name]
        sizes, busbw = [row.num_bytes for row in mine], [row.busbw for row in mine]
        axes.plot(sizes, busbw, style, color=color, label=name, markersize=5)
    ticks = list(dict.fromkeys(row.num_bytes for row in rows))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [short(tick) for tick in ticks])
    if rows[0].busbw:  # one device has no bus
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(LogFormatter())  # shown where a decade is high enough
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="bytes of one device's array", ylabel="busbw, GB/s (median)")
    lines = sorted(axes.get_lines(), key=lambda drawn: -drawn.get_ydata()[-1])
    axes.legend(handles=lines, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return lines


def short(number: int) -> str:
    """4096 as 4K: the inverse of :func:`num_bytes` for whole units."""
    unit = max((u for u in UNITS if number % UNITS[u] == 0), key=UNITS.get)
    return f"{number // UNITS[unit]}{unit}"


def wrong_values(rows) -> list:
    """A line that names the rows with wrong values, if there are any."""
    wrong = [f"{row.name} at {row.num_bytes} bytes" for row in rows if row.wrong]
    return [f"wrong values: {', '.join(wrong)}"] if wrong else []


if __name__ == "__main__":
    sys.exit(main())
