#!/usr/bin/env python
"""Plot what `gluonpar bench --json FILE` has measured: busbw over bytes, a line per candidate.

gluonpar bench --json bench.json
python tools/plot_bench.py bench.json bench.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "notebooks"))
from drawing import GREY, colour_of, label_ends, save, style
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from gluonpar.collectives import ALGORITHMS

SIZES = {(1 << 30): "G", (1 << 20): "M", (1 << 10): "K", 1: ""}


def plot(measured: str | Path, picture: str | Path) -> None:
    """Plot the file ``measured`` into the file ``picture``.

    gluonpar's algorithms have the colours that they have in other pictures; the others are grey and
    not solid.
    """
    record = json.loads(Path(measured).read_text("utf-8"))
    rows, options = record["rows"], record["arguments"]
    title = f"{options['collective']}: {options['dtype']} over {rows[0]['num_devices']} devices"
    with style(title):
        figure, ends = Figure(figsize=(9, 5)), []
        axes = figure.add_axes((0.08, 0.11, 0.77, 0.81))
        markers, dashes = itertools.cycle("osD^vPX<>*"), iter(("--", ":", "-.", (0, (6, 1))))
        for name in dict.fromkeys(row["name"] for row in rows):
            points = [(row["num_bytes"], row["busbw"]) for row in rows if row["name"] == name]
            is_ours = name in ALGORITHMS
            colour, line = (colour_of(name), "-") if is_ours else (GREY, next(dashes))
            look = {"color": colour, "linestyle": line, "linewidth": 1.8, "markersize": 5}
            axes.plot(*zip(*points), marker=next(markers), **look)
            ends.append((points[-1][1], name, colour))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted({row["num_bytes"] for row in rows})
        axes.set_xticks(sizes, map(_short, sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="bytes of one device's array", ylabel="busbw, GB/s: higher is better")
        axes.set_title(f"{title}, medians", loc="left")
        axes.margins(x=0.02)
        label_ends(axes, ends)
        by_speed = ", ".join(name for _, name, _ in sorted(ends, reverse=True))
        save(figure, picture, title, f"At the largest size, fastest first: {by_speed}.")


def _short(num_bytes: int) -> str:
    unit, letter = next(item for item in SIZES.items() if num_bytes >= item[0])
    return f"{num_bytes // unit}{letter}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", help="what gluonpar bench has written")
    parser.add_argument("picture", help="the file to write; its suffix names the format")
    plot(**vars(parser.parse_args()))
