"""The training benchmark's figures as bars."""

from __future__ import annotations

from typing import Any, Sequence

from benchmarks.training.candidates import FLOOR, OURS
from benchmarks.training.contest import Row


def draw(path: str, rows: Sequence[Row]) -> None:
    """Draw ms/step to the file ``path``: a bar a candidate, its quartiles, the floor as a line."""
    from matplotlib.figure import Figure

    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.setting.title, []).append(row)
    figure = Figure(figsize=(9, 1 + 2.6 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), squeeze=False)[:, 0]
    for axes, (name, group) in zip(panels, groups.items()):
        _bars(axes, group)
        axes.set_title(name)
    panels[-1].set_xlabel("ms/step (median and quartiles)")
    figure.savefig(path, dpi=120)


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    """One workload's bars, top down in the order of the table."""
    floor = [row for row in rows if row.name == FLOOR]
    rows = [row for row in rows if row.name != FLOOR]
    times = [1e3 * row.samples.median for row in rows]
    low, high = zip(*[row.samples.quartiles for row in rows]) if rows else ((), ())
    errors = [[t - 1e3 * q for t, q in zip(times, low)], [1e3 * q - t for t, q in zip(times, high)]]
    colors = ["C0" if row.name.startswith(OURS) else "0.7" for row in rows]
    drawn = axes.barh([row.name for row in rows], times, xerr=errors, color=colors)
    axes.bar_label(drawn, [f"{time:.1f}" for time in times], padding=4)
    for row in floor:
        axes.axvline(1e3 * row.samples.median, color="black", linestyle="--", label=FLOOR)
        axes.legend(frameon=False, loc="lower right")
    axes.invert_yaxis()
    axes.margins(x=0.12)
