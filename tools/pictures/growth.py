"""How each algorithm's time grows with the number of devices, simulated on two topologies."""

from __future__ import annotations

import functools
import math
import os

from drawing import colour_of, dashes, label_ends, save, style
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from simulator import simulate

from gluonpar.collectives import ALGORITHMS

TITLE = "The simulated time of an all-reduce by number of devices: lower is better"
NAMES = [name for name, plan in ALGORITHMS.items() if plan]
DEVICES = [1 << i for i in range(1, 10)]
SIZES = {"4 KB": 4e3, "1 MB": 1e6, "100 MB": 1e8}
TOPOLOGIES = {
    "nvswitch": "a switch, 144 GB/s",
    "ethernet": "hosts of 4, 10 Gbit/s each",
}


def draw(path: os.PathLike) -> None:
    """Simulate every algorithm that has a plan and draw a panel per topology and size."""
    seconds = _simulated()
    with style("growth"):
        figure = Figure((10, 6.4))
        figure.text(0.02, 0.955, TITLE, size=13, weight="bold")
        figure.text(0.02, 0.92, "Dashes of several colours: these lines coincide.", size=9.5)
        for row, (on, described) in enumerate(TOPOLOGIES.items()):
            for column, size in enumerate(SIZES):
                place = (0.07 + 0.275 * column, 0.56 - 0.455 * row, 0.215, 0.31)
                lines = {n: [seconds[n, k, on, size] for k in DEVICES] for n in NAMES}
                _panel(figure, place, f"{size}, {described}", lines, named=column == 2)
        best = ", ".join(
            f"{size} on {on}: {min(NAMES, key=lambda n: seconds[n, DEVICES[-1], on, size])}"
            for on in TOPOLOGIES
            for size in SIZES
        )
        save(
            figure, path, TITLE, f"Fastest on {DEVICES[-1]} devices, by size and topology: {best}."
        )


@functools.lru_cache(None)
def _simulated() -> dict[tuple, float]:
    """Return seconds by algorithm, number of devices, topology and size."""
    return {  # in an order in which each plan and each topology, which take seconds, is made once
        (name, k, on, size): simulate(name, k, num_bytes, on).seconds
        for k in DEVICES
        for name in NAMES
        for on in TOPOLOGIES
        for size, num_bytes in SIZES.items()
    }


def _panel(
    figure: Figure, place: tuple, title: str, lines: dict[str, list[float]], named: bool
) -> None:
    axes, ends = figure.add_axes(place), []
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, times in lines.items():
        gid = f"line-{name}-{title.replace(' ', '-')}"
        for start in range(len(DEVICES) - 1):
            part = slice(start, start + 2)
            same = [other for other in lines if _coincide(lines[other][part], times[part])]
            look = {"lw": 2.2, "ls": dashes(same.index(name), len(same)), "gid": f"{gid}-{start}"}
            look.update(dash_capstyle="butt", solid_capstyle="round")
            axes.plot(DEVICES[part], times[part], color=colour_of(name), **look)
        ends.append((times[-1], name, colour_of(name)))
    axes.set_title(title, loc="left", size=9.5)
    axes.set_xticks(DEVICES[1::2], map(str, DEVICES[1::2]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(10))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _seconds(y)))
    axes.tick_params(labelsize=8.5)
    axes.set_xlabel("devices", size=9)
    if named:
        label_ends(axes, ends, size=8.5)


def _coincide(times: list[float], others: list[float]) -> bool:
    """Whether two lines are so close that one would hide the other."""
    return all(abs(math.log10(a / b)) < 0.02 for a, b in zip(times, others))


def _seconds(seconds: float) -> str:
    for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.999 * unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"
