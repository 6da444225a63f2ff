"""The training benchmark: images per second by number of devices, and time per step."""

from __future__ import annotations

import os
import textwrap
from typing import Any, Sequence

from drawing import COLOURS, GREY, label_ends, save, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gluonpar.diagnostics import harness

# The labels of the candidates of benchmarks/training.
LABELS = {
    "gluonpar": "gluonpar",
    "gluonpar trainer": "gluonpar.Trainer",
    "trainer device": "gluon.Trainer, stock MXNet",
    "book": "the book's loop, stock MXNet",
    "torch ddp": "PyTorch DDP, gloo",
    "one context": "one context, stock MXNet",
    "one context imported": "one context, import gluonpar",
    "tensorflow mirrored": "TensorFlow MirroredStrategy",
    "jax shard_map": "JAX shard_map",
}
ALONE = "no exchange"  # the same devices, each alone on its shard
# All cores, whatever the number of devices of the others: one program, measured beside each.
ONE = "one context imported"
ONE_CONTEXT = ("one context", ONE)
LINES = {"tensorflow mirrored": 3, "gluonpar": 0, "torch ddp": 2, "trainer device": 4, "book": 7}


def condensed(record: dict[str, Any]) -> dict[str, Any]:
    """Return what :func:`draw` needs of a file written by ``benchmarks/training --json``.

    Seconds are rounded to microseconds, and no path of the machine is kept. The rows of one context
    have the samples of all of them: they are of one program.
    """
    rows = [
        {
            **{key: row[key] for key in ("name", "workload", "num_devices", "batch_size")},
            "median_seconds": round(row["median_seconds"], 6),
            "quartiles_seconds": [round(seconds, 6) for seconds in row["quartiles_seconds"]],
        }
        for row in pooled(record["rows"])
    ]
    arguments = {key: record["arguments"][key] for key in ("steps", "rounds", "warmup")}
    machine = {key: record["machine"][key] for key in ("processor", "cores", "date")}
    return {"machine": machine, "arguments": arguments, "rows": rows}


def pooled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, those of one context with median and quartiles of all their samples."""
    samples: dict[tuple, list[float]] = {}
    for row in rows:
        if row["name"] in ONE_CONTEXT:
            samples.setdefault((row["name"], row["workload"]), []).extend(row["seconds"])
    figures = {}
    for at, seconds in samples.items():
        all_ = harness.Samples(seconds)
        figures[at] = {"median_seconds": all_.median, "quartiles_seconds": all_.quartiles}
    return [{**row, **figures.get((row["name"], row["workload"]), {})} for row in rows]


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
    bars = sorted((r for r in peers if r["name"] != ALONE), key=lambda r: r["median_seconds"])
    (alone,) = (1e3 * row["median_seconds"] for row in peers if row["name"] == ALONE)
    with style("scaling"):
        figure = Figure((10, 5.2))
        _over_devices(figure.add_axes((0.065, 0.24, 0.24, 0.58)), rows)
        _beside_peers(figure.add_axes((0.715, 0.24, 0.27, 0.58)), bars, num_devices, alone)
        figure.text(0.02, 0.94, title, size=13, weight="bold")
        figure.text(0.02, 0.86, "images per second: higher is better")
        right = f"milliseconds per step on {num_devices} devices: lower is better"
        figure.text(0.985, 0.86, right, ha="right")
        figure.text(0.02, 0.03, textwrap.fill(note, 125), size=9.5)
        gluonpar = sorted((r["num_devices"], r) for r in rows if r["name"] == "gluonpar")
        rates = ", ".join(f"{_rate(row):.0f} with {k}" for k, row in gluonpar)
        one = ", ".join(f"{_rate(row):.0f}" for row in rows if row["name"] == ONE)
        times = ", ".join(f"{LABELS[r['name']]} {1e3 * r['median_seconds']:.0f}" for r in bars)
        description = (
            f"Left, images per second by number of devices: gluonpar {rates}; beside them one "
            f"context with all cores, after import gluonpar, {one}. Right, "
            f"milliseconds per step on {num_devices} devices: {times}; the same devices without "
            f"any exchange of gradients {alone:.0f}."
        )
        save(figure, path, title, description)


def _rate(row: dict[str, Any]) -> float:
    """Images per second."""
    return row["batch_size"] / row["median_seconds"]


def _over_devices(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    counts, ends = sorted({row["num_devices"] for row in rows}), []
    for name in (*LINES, ONE):
        mine = sorted((r for r in rows if r["name"] == name), key=lambda row: row["num_devices"])
        x = [counts.index(row["num_devices"]) for row in mine]
        medians = [_rate(row) for row in mine]
        quartiles = [[r["batch_size"] / s for s in r["quartiles_seconds"]] for r in mine]
        whiskers = [
            [median - slow for median, (_, slow) in zip(medians, quartiles)],
            [fast - median for median, (fast, _) in zip(medians, quartiles)],
        ]
        colour, ls = (GREY, "--") if name == ONE else (COLOURS[LINES[name]], "-")
        axes.errorbar(x, medians, whiskers, color=colour, ls="", elinewidth=1)
        gid = f"line-{name.replace(' ', '-')}"
        axes.plot(x, medians, color=colour, marker="o", lw=2, ls=ls, gid=gid)
        ends.append((medians[-1], LABELS[name], colour))
    axes.set_xticks(range(len(counts)), counts)
    axes.set(xlim=(-0.15, len(counts) - 0.9), xlabel="devices")
    axes.set_ylim(0)
    axes.grid(axis="x", alpha=0)
    label_ends(axes, ends)


def _beside_peers(
    axes: Axes, bars: Sequence[dict[str, Any]], num_devices: int, alone: float
) -> None:
    for i, row in enumerate(bars):
        ours = row["name"].startswith("gluonpar")
        colour, alpha = (COLOURS[0], 1.0) if ours else (GREY, 0.55)
        ms, low, high = (1e3 * s for s in (row["median_seconds"], *row["quartiles_seconds"]))
        gid = f"bar-{row['name'].replace(' ', '-')}"
        axes.barh(i, ms, 0.68, color=colour, alpha=alpha, gid=gid)
        axes.plot([low, high], [i, i], color=GREY, lw=1.4)
        axes.text(max(high, alone) + 3, i, f"{ms:.0f}", va="center")
    axes.axvline(alone, color=COLOURS[1], ls="--", gid="bar-alone")
    axes.set_yticks(range(len(bars)), [LABELS[row["name"]] for row in bars], size=9)
    axes.set(ylim=(len(bars) - 0.5, -0.5))
    axes.set_xlim(0, 1.15e3 * max(row["quartiles_seconds"][1] for row in bars))
    axes.set_xlabel(f"dashed: without any exchange, {alone:.0f} ms", color=COLOURS[1])
    axes.grid(False)
    axes.tick_params(axis="y", length=0)
