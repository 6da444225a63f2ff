"""The training benchmark, drawn: images a second over devices, and ms a step beside the peers."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Sequence

from gluonpar.collectives.drawing import COLOURS, GREY, save, sheet, style
from pictures.paper import SMALL, TITLE, WORDS, words

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What a candidate of benchmarks/training is called in the picture; others keep their names.
NAMES = {
    "gluonpar": "gluonpar",
    "gluonpar trainer": "gluonpar.Trainer",
    "floor": "no exchange at all",
    "trainer gluonpar": "gluon.Trainer,\nkvstore 'gluonpar'",
    "trainer device": "gluon.Trainer,\nas MXNet comes",
    "trainer device + our runtime": "gluon.Trainer,\nour runtime",
    "book": "the book's loop,\nas MXNet comes",
    "torch ddp": "PyTorch DDP,\ngloo",
    "horovod": "Horovod,\ngloo",
    "one context": "one context,\nall cores",
}
OURS, FLOOR = ("gluonpar", "gluonpar trainer"), "floor"
LINES = ("gluonpar", "trainer device", "book", "torch ddp")  # over the number of devices
LINE_COLOURS = dict(zip(LINES, (COLOURS[0], COLOURS[4], COLOURS[1], COLOURS[2])))
WIDTH, TOP, BAR = 10.0, 0.95, 0.36  # inches


def condensed(record: dict[str, Any]) -> dict[str, Any]:
    """What :func:`draw_scaling` needs of a file of ``benchmarks/training --json``.

    Seconds are rounded to microseconds; of the request only what the figures depend on stays.
    """
    kept = ("name", "workload", "num_devices", "batch_size", "version")
    arguments = {name: record["arguments"][name] for name in ("steps", "rounds", "warmup")}
    machine = {name: record["machine"][name] for name in ("processor", "cores", "date")}
    rows = [
        {
            **{name: row[name] for name in kept},
            "median_seconds": round(row["median_seconds"], 6),
            "quartiles_seconds": [round(time, 6) for time in row["quartiles_seconds"]],
        }
        for row in record["rows"]
    ]
    return {"machine": machine, "arguments": arguments, "rows": rows}


def draw_scaling(
    record: dict[str, Any],
    workload: str,
    title: str,
    num_devices: int = 2,
    path: str | os.PathLike | None = None,
    note: str = "",
) -> Figure:
    """Two panels on ``workload``: images a second over K, and ms a step on ``num_devices`` of them.

    ``record`` is a file of ``benchmarks/training --json``, or what :func:`condensed` leaves
    of it. Dots and bars are medians, whiskers quartiles; the dashed line is the time of the same
    devices without any exchange. ``note`` is written below. Written to ``path`` too, if given.
    Raises ValueError if nothing was measured on that workload and number of devices, ImportError
    without matplotlib.
    """
    rows = [row for row in record["rows"] if row["workload"] == workload]
    here = [row for row in rows if row["num_devices"] == num_devices]
    if not here:
        there = sorted({(row["workload"], row["num_devices"]) for row in record["rows"]})
        raise ValueError(
            f"nothing was measured for {workload!r} on {num_devices} devices; there are {there}"
        )
    notes = textwrap.wrap(note, 118)
    bars = sorted((r for r in here if r["name"] != FLOOR), key=lambda row: row["median_seconds"])
    height = max(2.6, (BAR + 0.1) * len(bars))
    with style("scaling"):
        figure, axes = sheet(WIDTH, TOP + height + 0.75 + 0.21 * len(notes))
        words(axes, 0.2, 0.26, title, ha="left", size=TITLE, weight="bold")
        _over_devices(_panel(figure, axes, 0.75, 2.7, height), rows)
        _beside_peers(_panel(figure, axes, 6.2, 3.5, height), bars, here)
        words(axes, 0.75, TOP - 0.25, "images a second, over devices", ha="left")
        words(axes, 6.2, TOP - 0.25, f"ms a step on {num_devices} devices", ha="left")
        for i, line in enumerate(notes):
            words(axes, 0.2, TOP + height + 0.65 + 0.21 * i, line, ha="left", size=SMALL)
        if path is not None:
            save(figure, path, title, _description(rows, bars, here, num_devices))
    return figure


def _panel(figure: Figure, sheet_: Axes, left: float, width: float, height: float) -> Axes:
    """Axes of their own at ``left``, in inches, under the title."""
    whole = sheet_.get_ylim()[0]
    bottom = whole - TOP - height
    made = figure.add_axes((left / WIDTH, bottom / whole, width / WIDTH, height / whole))
    made.grid(False)
    made.tick_params(colors=GREY, labelsize=SMALL, length=0)
    for spine in made.spines.values():
        spine.set(color=GREY, linewidth=0.6, alpha=0.5)
    return made


def _over_devices(axes: Axes, rows: Sequence[dict]) -> None:
    counts = sorted({row["num_devices"] for row in rows})
    ends = []
    for name in LINES:
        mine = sorted((r for r in rows if r["name"] == name), key=lambda row: row["num_devices"])
        if not mine:
            continue
        places = [counts.index(row["num_devices"]) for row in mine]
        rates = [[_rate(row, row["median_seconds"]), *_rates(row)] for row in mine]
        medians = [median for median, _, _ in rates]
        errors = [[m - low for m, low, _ in rates], [high - m for m, _, high in rates]]
        colour, gid = LINE_COLOURS[name], f"line-{name.replace(' ', '-')}"
        axes.errorbar(places, medians, errors, color=colour, lw=1.0, elinewidth=1.0, ls="")
        axes.plot(places, medians, color=colour, marker="o", ms=6, lw=2, gid=gid)
        ends.append((medians[-1], NAMES[name], colour))
    axes.set_xlim(-0.25, len(counts) - 0.9 + 0.15 * (len(counts) == 1))
    top = 1.12 * max(_rate(row, row["quartiles_seconds"][0]) for row in rows)
    axes.set(ylim=(0, top), yticks=_ticks(top))
    axes.set_xticks(range(len(counts)), [f"K = {k}" if k == counts[0] else k for k in counts])
    axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.6)
    for (_, name, colour), y in zip(ends, _apart([end for end, _, _ in ends], axes)):
        where = axes.get_yaxis_transform()  # across in widths of the panel
        axes.text(1.04, y, name, color=colour, size=SMALL, va="center", transform=where)


def _apart(values: Sequence[float], axes: Axes) -> list[float]:
    """The values, moved as little as names of two lines need to stand above each other."""
    inches = axes.get_position().height * axes.figure.get_figheight()
    least = 0.35 / inches * axes.get_ylim()[1]
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = list(values)
    for below, i in zip(order, order[1:]):
        found[i] = max(found[i], found[below] + least)
    return found


def _beside_peers(axes: Axes, bars: Sequence[dict], here: Sequence[dict]) -> None:
    times = [1e3 * row["median_seconds"] for row in bars]
    limit = 1.18 * max(1e3 * row["quartiles_seconds"][1] for row in here)
    for i, (row, time) in enumerate(zip(bars, times)):
        colour = COLOURS[0] if row["name"] in OURS else GREY
        low, high = (1e3 * quartile for quartile in row["quartiles_seconds"])
        alpha = 1.0 if row["name"] in OURS else 0.55
        gid = f"bar-{row['name'].replace(' ', '-')}"
        axes.barh(i, time, 0.68, color=colour, alpha=alpha, gid=gid)
        axes.plot([low, high], [i, i], color=GREY, lw=1.4)
        axes.text(
            max(time, high) + limit / 60, i, f"{time:.0f}", color=GREY, size=WORDS, va="center"
        )
    axes.set_yticks(range(len(bars)), [NAMES.get(row["name"], row["name"]) for row in bars])
    axes.set(xlim=(0, limit), xticks=_ticks(limit), ylim=(len(bars) - 0.4, -0.6))
    for row in here:
        if row["name"] == FLOOR:
            x = 1e3 * row["median_seconds"]
            axes.axvline(x, color=COLOURS[1], ls=(0, (4, 2)), lw=1.4, gid="bar-floor")
            text = f"dashed: {NAMES[FLOOR]}, {x:.0f} ms"
            axes.set_xlabel(text, color=COLOURS[1], size=SMALL)


def _ticks(limit: float) -> list[float]:
    """Round numbers from 0 up to the limit, about six."""
    from matplotlib.ticker import MaxNLocator

    return [tick for tick in MaxNLocator(6).tick_values(0, limit) if tick <= limit]


def _rate(row: dict, seconds: float) -> float:
    return row["batch_size"] / seconds


def _rates(row: dict) -> tuple[float, float]:
    low, high = (_rate(row, time) for time in row["quartiles_seconds"])
    return min(low, high), max(low, high)


def _description(
    rows: Sequence[dict], bars: Sequence[dict], here: Sequence[dict], num_devices: int
) -> str:
    """The figures in words."""
    ours = sorted((r for r in rows if r["name"] == "gluonpar"), key=lambda r: r["num_devices"])
    over = ", ".join(f"{_rate(r, r['median_seconds']):.0f} with {r['num_devices']}" for r in ours)
    times = ", ".join(f"{_plain(row)} {1e3 * row['median_seconds']:.0f}" for row in bars)
    floor = [1e3 * row["median_seconds"] for row in here if row["name"] == FLOOR]
    without = f"; the same devices without any exchange {floor[0]:.0f}" if floor else ""
    return (
        f"Left, images a second over the number of devices: gluonpar {over}. "
        f"Right, milliseconds a step on {num_devices} devices: {times}{without}."
    )


def _plain(row: dict) -> str:
    return NAMES.get(row["name"], row["name"]).replace("\n", " ")
