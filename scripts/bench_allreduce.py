#!/usr/bin/env python
"""Measure the all-reduce algorithms beside MXNet's kvstore and a NumPy floor, as nccl-tests does.

python scripts/bench_allreduce.py --num-gpus 2
python scripts/bench_allreduce.py --num-gpus 4 --device cpu --min-bytes 64K --factor 4
python scripts/bench_allreduce.py --algorithms host,ring --json bench.json --plot bench.png

Exit code: 0; 1 if any value was wrong; 2 for a request that cannot be met; 130 after Ctrl-C.
"""

import argparse
import functools
import re
import sys

try:
    from gluonpar import bench_allreduce, cli, collectives, devices, measure, report, threads
    from gluonpar.collectives import checks, registry
    from gluonpar.version import __version__
except ImportError as error:
    remedy = " (in a clone: pip install -e '.[cpu]')" if error.name == "gluonpar" else ""
    print(f"bench_allreduce.py: error: {error}{remedy}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

from mxnet.base import MXNetError
from tqdm import tqdm

MEASURED, WRONG = 0, 1
PEER, FLOOR = bench_allreduce.PEER, bench_allreduce.FLOOR
HEADINGS = ("bytes", "elements", "candidate", "time us", "iqr us", "algbw GB/s", "busbw GB/s")
HEADINGS += (f"/ {PEER}", f"/ {FLOOR}", "#wrong")
THEIRS = {PEER: "^--", "mxnet local": "v:", FLOOR: "s-"}  # black, by marker and line
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main(argv=None) -> int:
    """Measure what ``argv`` asks for and print it size by size; the exit code."""
    made = parser()
    options = made.parse_args(argv)
    console, rows = report.Console(), []
    try:
        run(options, made, console, rows)
    except (KeyboardInterrupt, MXNetError) as error:
        # Ctrl-C may arrive in a function of ours that MXNet's engine runs, and makes its error.
        if "KeyboardInterrupt" not in repr(error):
            raise
        console.notice(f"\n{made.prog}: interrupted; {len(rows)} rows were measured")
        return cli.INTERRUPTED
    finally:
        if options.plot and rows:
            plot(options, rows)
    return verdict(console, made.prog, rows)


def run(options, made, console, rows):
    """Extend ``rows`` size by size; exit if the request cannot be met."""
    result = {"machine": measure.machine(), "arguments": vars(options)}
    try:
        sizes = bench_allreduce.sizes(
            options.min_bytes, options.max_bytes, options.factor, options.dtype
        )
        setting, notice = request(options)
        found = bench_allreduce.makers(setting.ctx, options.algorithms)
        found, result["left_out"] = bench_allreduce.split_off_unable(found, setting)
        keep(options.json, result, rows)
    except ValueError as error:
        made.error(cli.as_typed(str(error), made))
    left_out = [f"left out: {name}: {reason}" for name, reason in result["left_out"].items()]
    for text in filter(None, [notice, *left_out]):
        console.notice(text)
    header(console, result["machine"], setting)
    for size in sizes:
        bar = functools.partial(
            tqdm, desc=f"{size} elements", leave=False, disable=None, unit="round"
        )
        new = bench_allreduce.measure_size(found, setting, size, bar)
        table(console, new, first=not rows)
        rows += new
        keep(options.json, result, rows)


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a request."""

    def error(self, message):
        """Exit with that line."""
        self.exit(cli.BAD_REQUEST, f"{self.prog}: error: {message}\n")


def parser() -> Parser:
    """The options, by nccl-tests' names."""
    made = Parser(description=__doc__.partition("\n")[0])
    made.add_argument("--version", action="version", version=f"gluonpar {__version__}")

    def add(name, default, help_, **more):
        made.add_argument(name, default=default, help=f"{help_} (default: %(default)s)", **more)

    size = {"type": num_bytes, "metavar": "SIZE"}
    add("--min-bytes", "4K", "the smallest array of one device, such as 4096 or 4K", **size)
    add("--max-bytes", "64M", "the largest", **size)
    add("--factor", 8, "from one size to the next", type=int, metavar="N")
    add("--num-gpus", 2, "devices; CPU devices if there is no GPU at all", type=int, metavar="K")
    add("--device", "auto", "GPUs or nothing; CPU devices; or as above", choices=devices.KINDS)
    add("--dtype", "float32", "of the arrays", choices=bench_allreduce.DTYPES)
    add("--op", "sum", "how arrays are combined", choices=checks.OPS)
    add("--iters", 20, "rounds that count", type=int, metavar="N", dest="rounds")
    add("--warmup", 5, "rounds before, that do not", type=int, metavar="N")
    add("--check", 1, "whether to compare every value with NumPy's", type=int, choices=(0, 1))
    every = ",".join(collectives.ALGORITHMS)
    add("--algorithms", every, "gluonpar's to be measured", metavar="A,B", type=names)
    made.add_argument("--json", metavar="FILE", help="write all samples to this file")
    made.add_argument("--plot", metavar="FILE.png", help="draw busbw over bytes")
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
    """The setting and a notice on its devices; ValueError if it, or the plot, cannot be had."""
    if options.plot:
        report.check_plot(options.plot)
    chosen = devices.choose(num_gpus=options.num_gpus, device=options.device)
    setting = bench_allreduce.Setting(
        chosen.ctx, options.dtype, options.op, options.rounds, options.warmup, bool(options.check)
    )
    threads.share(chosen.ctx)
    return setting, chosen.notice


def keep(path, result, rows):
    """Write what there is so far, so that it is there whatever comes."""
    if path:
        measure.write_json(path, {**result, "rows": [row.as_dict() for row in rows]})


def header(console, machine, setting):
    """Print what the figures depend on and what they mean."""
    of = setting.ctx
    how = threads.describe(of) or "; ".join(machine["gpus"])
    checked = "every value compared with NumPy's" if setting.check else "values not checked"
    console.header(
        __version__,
        {
            "machine": f"{machine['processor']}, {machine['cores']} cores usable",
            "date": machine["date"],
            "devices": f"{list(of)}, {how}",
            FLOOR: f"NumPy on the same memory, {bench_allreduce.floor_threads()} threads from "
            f"{bench_allreduce.FLOOR_ALONE} bytes up",
            "all-reduce": f"{setting.op} of {setting.dtype}, {checked}",
            "samples": f"{setting.rounds} rounds after {setting.warmup} to warm up, all candidates "
            "in turns; time is the median, iqr the interquartile range",
            "ratios": f"of times to those of {PEER} and {FLOOR}: below 1 is faster",
        },
    )


def table(console, rows, first):
    """Print a line for each row, under the headings if these are the first."""
    console.line("\n" + line(HEADINGS) if first else "")
    seconds = {row.name: row.samples.median for row in rows}
    for row in rows:
        time, spread = row.samples.median, row.samples.spread
        ratios = [f"{time / seconds[to]:.2f}" if to in seconds else "-" for to in (PEER, FLOOR)]
        figures = (f"{1e6 * time:.1f}", f"{1e6 * spread:.1f}", f"{row.algbw:.3f}")
        wrong = "-" if row.wrong is None else row.wrong
        bus = f"{row.busbw:.3f}"
        console.line(line((row.num_bytes, row.elements, row.name, *figures, bus, *ratios, wrong)))


def line(cells) -> str:
    """The cells under their headings: numbers to the right, names to the left."""
    widths = (11, 10, -18, 10, 9, 10, 10, 14, 7, 7)
    return " ".join(f"{c!s:{'<' if w < 0 else '>'}{abs(w)}}" for c, w in zip(cells, widths))


def plot(options, rows):
    """Draw busbw over bytes, a line for each candidate; the fastest at the end is named first."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(dict.fromkeys(row.name for row in rows)):
        style, color = (THEIRS[name], "black") if name in THEIRS else ("o-", f"C{i}")
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
    what = f"{options.op} of {options.dtype} over {rows[0].num_devices} devices"
    axes.set_title(f"all-reduce: {what}")
    axes.grid(alpha=0.3)
    lines = sorted(axes.get_lines(), key=lambda drawn: -drawn.get_ydata()[-1])
    figure.legend(handles=lines, loc="outside right upper", frameon=False)
    figure.savefig(options.plot, dpi=120)


def short(number: int) -> str:
    """4096 as 4K: the inverse of :func:`num_bytes` for whole units."""
    unit = max((u for u in UNITS if number % UNITS[u] == 0), key=UNITS.get)
    return f"{number // UNITS[unit]}{unit}"


def verdict(console, prog, rows) -> int:
    """The exit code; names what was wrong."""
    wrong = [f"{row.name} at {row.num_bytes} bytes" for row in rows if row.wrong]
    if not wrong:
        return MEASURED
    console.notice(f"{prog}: wrong values: {', '.join(wrong)}")
    return WRONG


if __name__ == "__main__":
    sys.exit(main())
