#!/usr/bin/env python
"""Measure a training step beside its peers, each in its own process, all in turns.

python scripts/bench_training.py --num-gpus 2
python scripts/bench_training.py --workload mlp --num-gpus 1,2,4 --device cpu --rounds 6
python scripts/bench_training.py --torch-python ~/torch/bin/python --json a.json --plot a.png

Exit code: 0; 1 if a candidate died, or trained another function than the others; 2 for a request
that cannot be met; 130 after Ctrl-C.
"""

import argparse
import functools
import sys

try:
    from gluonpar import cli, devices, measure, report
    from gluonpar.bench_training import contest, process
    from gluonpar.bench_training.workloads import WORKLOADS
    from gluonpar.version import __version__
except ImportError as error:
    remedy = " (in a clone: pip install -e '.[cpu]')" if error.name == "gluonpar" else ""
    print(f"bench_training.py: error: {error}{remedy}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

from tqdm import tqdm

MEASURED, WRONG = 0, 1
FLOOR = contest.FLOOR
HEADINGS = ("candidate", "ms/step", "iqr ms", "images/s", f"/ {FLOOR}", "loss", "off", "peak MB")
IDLE_CPU = 0.05  # of a core: more than this, burnt while waiting, disturbs the others


def main(argv=None) -> int:
    """Measure what ``argv`` asks for and print it workload by workload; the exit code."""
    made = parser()
    options = made.parse_args(argv)
    console, rows, failed = report.Console(), [], []
    try:
        run(options, made, console, rows, failed)
    except KeyboardInterrupt:
        console.notice(f"\n{made.prog}: interrupted; {len(rows)} rows were measured")
        return cli.INTERRUPTED
    finally:
        if options.plot and rows:
            plot(options, rows)
    return verdict(console, made.prog, rows, failed)


def run(options, made, console, rows, failed):
    """Extend ``rows`` and ``failed`` workload by workload; exit if the request cannot be met."""
    result = {"machine": measure.machine(), "arguments": vars(options), "left_out": []}
    result["failed"] = failed
    try:
        settings, notices = request(options)
        keep(options.json, result, rows)
    except ValueError as error:
        made.error(cli.as_typed(str(error), made))
    for notice in notices:
        console.notice(notice)
    header(console, result["machine"], options)
    for setting in settings:
        with contest.Contest(setting) as held:
            new = hold(held, options.candidates)
        table(console, setting, new)
        remarks(console, held, new)
        rows += new
        failed += [[title(setting), *failure] for failure in held.failed.items()]
        result["left_out"] += [[title(setting), *left] for left in held.left_out.items()]
        keep(options.json, result, rows)


def hold(held, candidates):
    """Start all candidates, let them train in turns, and return their rows."""
    bar = functools.partial(tqdm, leave=False, disable=None)
    for name in bar(candidates, desc="starting", unit="process"):
        held.start(name)
    held.measure(functools.partial(bar, desc=title(held.setting), unit="round"))
    return held.rows()


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a request."""

    def error(self, message):
        """Exit with that line."""
        self.exit(cli.BAD_REQUEST, f"{self.prog}: error: {message}\n")


def parser() -> Parser:
    """The options."""
    made = Parser(description=__doc__.partition("\n")[0])
    made.add_argument("--version", action="version", version=f"gluonpar {__version__}")

    def add(name, default, help_, **more):
        made.add_argument(name, default=default, help=f"{help_} (default: %(default)s)", **more)

    every = ",".join(WORKLOADS)
    add("--workload", every, "what to train", type=among(WORKLOADS), metavar="A,B")
    add("--num-gpus", "2", "devices; CPU devices if there is no GPU", type=numbers, metavar="K,...")
    add("--device", "auto", "GPUs or nothing; CPU devices; or as above", choices=devices.KINDS)
    every, known = ",".join(contest.CANDIDATES), among(contest.CANDIDATES)
    add("--candidates", every, "who is measured", metavar="A,B", type=known)
    help_ = "samples a step, over all devices (default: the workload's)"
    made.add_argument("--batch-size", type=int, metavar="N", help=help_)
    add("--steps", 5, "steps a sample", type=int, metavar="N")
    add("--rounds", 12, "samples of each candidate", type=int, metavar="N")
    add("--warmup", 5, "steps before, that do not count", type=int, metavar="N")
    help_ = "interpreter that has PyTorch (default: this one)"
    made.add_argument("--torch-python", metavar="PATH", default=sys.executable, help=help_)
    made.add_argument("--json", metavar="FILE", help="write all samples to this file")
    made.add_argument("--plot", metavar="FILE.png", help="draw ms/step")
    return made


def among(known):
    """A type for lists of names that there are."""

    def names(text: str) -> list:
        found = list(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in found:
            if name not in known:
                there = ", ".join(known)
                raise argparse.ArgumentTypeError(f"there is no {name!r}; there are: {there}")
        return found

    return names


def numbers(text: str) -> list:
    """Numbers of devices."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,2,4") from None


def request(options):
    """The settings in turn, and notices on their devices; ValueError if they cannot be had."""
    if options.plot:
        report.check_plot(options.plot)
    if contest.TORCH in options.candidates:
        process.check_python(options.torch_python)
    chosen = [devices.choose(num_gpus=k, device=options.device) for k in options.num_gpus]
    settings = [
        contest.Setting(
            workload,
            choice.ctx,
            options.batch_size,
            options.steps,
            options.rounds,
            options.warmup,
            options.torch_python,
        )
        for workload in options.workload
        for choice in chosen
    ]
    return settings, [choice.notice for choice in chosen if choice.notice]


def keep(path, result, rows):
    """Write what there is so far, so that it is there whatever comes."""
    if path:
        measure.write_json(path, {**result, "rows": [row.as_dict() for row in rows]})


def header(console, machine, options):
    """Print what the figures depend on and what they mean."""
    console.header(
        __version__,
        {
            "machine": f"{machine['processor']}, {machine['cores']} cores usable"
            + "".join(f"; {gpu}" for gpu in machine["gpus"]),
            "date": machine["date"],
            "samples": f"{options.rounds} rounds of {options.steps} steps after {options.warmup} "
            "to warm up, all candidates in turns; a step is the median, iqr the "
            "interquartile range",
            "processes": "one a candidate, without the MXNET_*, OMP_* and MALLOC_* set here; one "
            "computes, the others wait",
            "data": "one random batch in NumPy, which each loads and splits in every step",
            "loss": f"after the last step; off: from that of {contest.REFERENCE!r}, else their "
            f"median; more than {contest.TOLERANCE:g} is wrong",
        },
    )
    for name in options.candidates:
        console.line(f"{name}: {contest.CANDIDATES[name].about}")


def title(setting) -> str:
    """Workload, batch and devices."""
    return f"{setting.workload}, batch {setting.samples} on {list(setting.ctx)}"


def table(console, setting, rows):
    """Print a line for each row, under the headings."""
    console.line(f"\n{title(setting)}")
    console.line(line(HEADINGS))
    floor = next((row.samples.median for row in rows if row.name == FLOOR), None)
    for row in rows:
        time, spread = row.samples.median, row.samples.spread
        ratio = f"{time / floor:.2f}" if floor else "-"
        off = "-" if row.deviation is None else f"{row.deviation:+.1e}"
        figures = (f"{1e3 * time:.2f}", f"{1e3 * spread:.2f}", f"{row.images_per_second:.0f}")
        loss, peak = f"{row.last_loss:.4f}", f"{row.peak_bytes / 1e6:.0f}"
        console.line(line((row.name, *figures, ratio, loss, off, peak)))


def line(cells) -> str:
    """The cells under their headings: numbers to the right, names to the left."""
    widths = (-28, 9, 9, 10, 7, 9, 9, 8)
    return " ".join(f"{c!s:{'<' if w < 0 else '>'}{abs(w)}}" for c, w in zip(cells, widths))


def remarks(console, held, rows):
    """Print who is missing and why, and who was not idle when it should have been."""
    for row in rows:
        if row.version:
            console.line(f"{row.name}: {row.version}")
        if row.idle_cpu > IDLE_CPU:
            console.notice(f"{row.name}: burnt {row.idle_cpu:.0%} of a core while others trained")
    for name, reason in held.left_out.items():
        console.notice(f"left out: {name}: {reason}")
    for name, how in held.failed.items():
        console.notice(f"failed: {name}: {how}")


def plot(options, rows):
    """Draw ms/step, a bar a candidate with its quartiles, the floor as a line."""
    from matplotlib.figure import Figure

    groups = {}
    for row in rows:
        groups.setdefault(title(row.setting), []).append(row)
    figure = Figure(figsize=(9, 1 + 2.6 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), squeeze=False)[:, 0]
    for axes, (name, group) in zip(panels, groups.items()):
        bars(axes, group)
        axes.set_title(name)
    panels[-1].set_xlabel("ms/step (median and quartiles)")
    figure.savefig(options.plot, dpi=120)


def bars(axes, rows):
    """One workload's bars, top down in the order of the table."""
    floor = [row for row in rows if row.name == FLOOR]
    rows = [row for row in rows if row.name != FLOOR]
    times = [1e3 * row.samples.median for row in rows]
    low, high = zip(*[row.samples.quartiles for row in rows]) if rows else ((), ())
    errors = [[t - 1e3 * q for t, q in zip(times, low)], [1e3 * q - t for t, q in zip(times, high)]]
    colors = ["C0" if row.name == "gluonpar" else "0.7" for row in rows]
    drawn = axes.barh([row.name for row in rows], times, xerr=errors, color=colors)
    axes.bar_label(drawn, [f"{time:.1f}" for time in times], padding=4)
    for row in floor:
        axes.axvline(1e3 * row.samples.median, color="black", linestyle="--", label=FLOOR)
        axes.legend(frameon=False, loc="lower right")
    axes.invert_yaxis()
    axes.margins(x=0.12)


def verdict(console, prog, rows, failed) -> int:
    """The exit code; names what was wrong."""
    wrong = [f"{row.name} on {title(row.setting)}" for row in rows if row.wrong]
    if wrong:
        console.notice(f"{prog}: another loss than the others': {'; '.join(wrong)}")
    if failed:
        names = "; ".join(f"{name} on {what}" for what, name, _ in failed)
        console.notice(f"{prog}: failed: {names}")
    return WRONG if wrong or failed else MEASURED


if __name__ == "__main__":
    sys.exit(main())
