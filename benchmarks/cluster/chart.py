"""The cluster benchmark's all-reduces over their bytes, beside the model's lines."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from benchmarks.cluster import model, tables
from benchmarks.cluster.contest import STEPS, Row


def draw(path: str, rows: Sequence[Row], cores: int) -> None:
    """Draw ms over bytes to the file ``path``: a panel for each number of processes above one."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if any(what != STEPS for what in row.seconds)]
    numbers = sorted({row.processes for row in rows})
    figure = Figure(figsize=(5 * max(1, len(numbers)), 4), layout="constrained")
    panels = figure.subplots(1, max(1, len(numbers)), sharey=True, squeeze=False)[0]
    try:
        network = model.fit(tables.points(rows, cores))
    except ValueError:
        network = None
    for axes, number in zip(panels, numbers):
        for row in (row for row in rows if row.processes == number):
            sizes = [n for n in row.seconds if n != STEPS]
            ms = [1e3 * row.median(n) for n in sizes]
            axes.plot([4 * n for n in sizes], ms, marker="o", label=row.name)
        if network:
            some = np.geomspace(*axes.dataLim.intervalx, 50)
            crowding = model.crowding(number, cores)
            says = [1e3 * model.allreduce_seconds(number, n, network, crowding) for n in some]
            axes.plot(some, says, color="0.5", linestyle="--", label="model of gluonpar")
        axes.set(xscale="log", yscale="log", xlabel="bytes", title=f"{number} processes")
        axes.legend(frameon=False)
    panels[0].set_ylabel("ms an all-reduce")
    figure.savefig(path, dpi=120)
