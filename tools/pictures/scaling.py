"""The training benchmark: images per second by number of devices, and time per step."""

from __future__ import annotations

import os
import textwrap
from typing import Any, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gluonpar.collectives.drawing import COLOURS, GREY, save, style

# The labels of the candidates of benchmarks/training.
LABELS = {
    "gluonpar": "gluonpar",
    "gluonpar trainer": "gluonpar.Trainer",
    "trainer gluonpar": "gluon.Trainer,\nkvstore 'gluonpar'",
    "trainer device": "gluon.Trainer,\nstock MXNet",
    "book": "the book's loop,\nstock MXNet",
    "torch ddp": "PyTorch DDP,\ngloo",
    "one context": "one context,\nstock MXNet",
    "one context imported": "one context,\nimport gluonpar",
    "tensorflow mirrored": "TensorFlow\nMirroredStrategy",
    "jax shard_map": "JAX shard_map",
}
FLOOR = "floor"  # the same devices without any exchange of gradients
LINES = {"tensorflow mirrored": 3, "gluonpar": 0, "torch ddp": 2, "trainer device": 4, "book": 1}


def condensed(record: dict[str, Any]) -> dict[str, Any]:
    """Return what :func:`draw` needs of a file written by ``benchmarks/training --json``.

    Seconds are rounded to microseconds, and no path of the machine is kept.
    """
    rows = [
        {
            **{key: row[key] for key in ("name", "workload", "num_devices", "batch_size")},
            "median_seconds": round(row["median_seconds"], 6),
            "quartiles_seconds": [round(seconds, 6) for seconds in row["quartiles_seconds"]],
        }
        for row in record["rows"]
    ]
    arguments = {key: record["arguments"][key] for key in ("steps", "rounds", "warmup")}
    machine = {key: record["machine"][key] for key in ("processor", "cores", "date")}
    return {"machine": machine, "arguments": arguments, "rows": rows}


def draw(
    record: dict[str, Any],
    workload: str,
    num_devices: int,
    title: str,
    note: str,
    path: os.PathLike,
) -> None:
    """Draw what :func:`condensed` returned: two panels, and ``note`` below them.

    Dots and bars are medians, whiskers quartiles.
    """
    rows = [row for row in record["rows"] if row["workload"] == workload]
    peers = [row for row in rows if row["num_devices"] == num_devices]
    bars = sorted((r for r in peers if r["name"] != FLOOR), key=lambda r: r["median_seconds"])
    (floor,) = (1e3 * row["median_seconds"] for row in peers if row["name"] == FLOOR)
    with style("scaling"):
        figure = Figure((10, 5.1))
        _over_devices(figure.add_axes((0.065, 0.2, 0.36, 0.63)), rows)
        _beside_peers(figure.add_axes((0.62, 0.2, 0.36, 0.63)), bars, num_devices, floor)
        figure.text(0.02, 0.94, title, size=13, weight="bold")
        figure.text(0.02, 0.035, textwrap.fill(note, 125), size=9.5)
        gluonpar = sorted((r["num_devices"], r) for r in rows if r["name"] == "gluonpar")
        rates = ", ".join(f"{_rate(row):.0f} with {k}" for k, row in gluonpar)
        times = ", ".join(f"{_label(r, ' ')} {1e3 * r['median_seconds']:.0f}" for r in bars)
        description = (
            f"Left, images per second by number of devices: gluonpar {rates}. Right, milliseconds "
            f"per step on {num_devices} devices: {times}; the same devices without any exchange of "
            f"gradients {floor:.0f}."
        )
        save(figure, path, title, description)


def _label(row: dict[str, Any], separator: str = "\n") -> str:
    return LABELS[row["name"]].replace("\n", separator)


def _rate(row: dict[str, Any]) -> float:
    """Images per second."""
    return row["batch_size"] / row["median_seconds"]


def _over_devices(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    counts = sorted({row["num_devices"] for row in rows})
    for name, colour in LINES.items():
        mine = sorted((r for r in rows if r["name"] == name), key=lambda row: row["num_devices"])
        x = [counts.index(row["num_devices"]) for row in mine]
        medians = [_rate(row) for row in mine]
        quartiles = [[r["batch_size"] / s for s in r["quartiles_seconds"]] for r in mine]
        whiskers = [
            [median - slow for median, (_, slow) in zip(medians, quartiles)],
            [fast - median for median, (fast, _) in zip(medians, quartiles)],
        ]
        axes.errorbar(x, medians, whiskers, color=COLOURS[colour], ls="", elinewidth=1)
        gid = f"line-{name.replace(' ', '-')}"
        label = LABELS[name].replace("\n", " ")
        axes.plot(x, medians, color=COLOURS[colour], marker="o", lw=2, gid=gid, label=label)
    axes.set_xticks(range(len(counts)), counts)
    axes.set(xlim=(-0.25, len(counts) - 0.75), xlabel="devices", title="images per second")
    axes.set_ylim(0)
    axes.grid(False)
    axes.legend(
        loc="lower left", frameon=False, labelcolor="linecolor", fontsize=9, labelspacing=0.15
    )


def _beside_peers(
    axes: Axes, bars: Sequence[dict[str, Any]], num_devices: int, floor: float
) -> None:
    for i, row in enumerate(bars):
        ours = row["name"].startswith("gluonpar")
        colour, alpha = (COLOURS[0], 1.0) if ours else (GREY, 0.55)
        ms, low, high = (1e3 * s for s in (row["median_seconds"], *row["quartiles_seconds"]))
        gid = f"bar-{row['name'].replace(' ', '-')}"
        axes.barh(i, ms, 0.68, color=colour, alpha=alpha, gid=gid)
        axes.plot([low, high], [i, i], color=GREY, lw=1.4)
        axes.text(high + 2, i, f"{ms:.0f}", va="center")
    axes.axvline(floor, color=COLOURS[1], ls="--", gid="bar-floor")
    axes.set_yticks(range(len(bars)), [_label(row) for row in bars])
    axes.set(ylim=(len(bars) - 0.5, -0.5), title=f"ms per step on {num_devices} devices")
    axes.set_xlim(0, 1.15e3 * max(row["quartiles_seconds"][1] for row in bars))
    axes.set_xlabel(f"dashed: without any exchange, {floor:.0f} ms", color=COLOURS[1])
    axes.grid(axis="y", alpha=0)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
