"""A soak as four panels over its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

from benchmarks.training.soak import MB, Soak
from gluonpar.plans.drawing import COLOURS, GREY, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE = COLOURS[0], COLOURS[1]


def draw(path: str, soaks: Sequence[Soak]) -> None:
    """Draw memory, threads, descriptors and images/s of each soak to the file ``path``.

    Every axis begins at 0. An SVG contains the panels' titles as its description.
    """
    title = "; ".join(soak.title for soak in soaks)
    with style(title):
        from matplotlib.figure import Figure

        figure = Figure((8.0, 4.5 * len(soaks)), layout="constrained")
        parts = figure.subfigures(len(soaks), squeeze=False, hspace=0.05)[:, 0]
        words = [_draw_soak(part, soak) for part, soak in zip(parts, soaks)]
        save(figure, path, title, " ".join(words), dpi=120)


def _draw_soak(part: Any, soak: Soak) -> str:
    """Draw four panels; return their description."""
    part.set_facecolor("none")
    part.suptitle(soak.title, fontweight="bold")
    panels = part.subplots(2, 2, sharex=True).ravel()
    every, (slope, start) = [soak.warm, *soak.samples], soak.line
    steps = [sample.steps for sample in every]
    resident = [sample.resident_bytes / MB for sample in every]
    panels[0].plot(steps, resident, color=BLUE, lw=4, alpha=0.6)
    ends = soak.samples[soak.tenth].steps, soak.samples[-1].steps
    panels[0].plot(ends, [(start + slope * end) / MB for end in ends], color=ORANGE, lw=1)
    panels[0].set_title(f"resident MB: {soak.growth / MB:+.1f} over the last nine tenths")
    for axes, what in zip(panels[1:], ("threads", "descriptors")):
        counts = [getattr(sample, what) for sample in every]
        axes.plot(steps, counts, color=BLUE)
        axes.locator_params("y", nbins=5, integer=True)
        axes.set_title(f"{what}: {counts[0]} after the warm-up, {counts[-1]} at the end")
    _images(panels[3], soak, steps)
    for axes in panels:
        axes.locator_params("x", nbins=5, integer=True)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.2 * max(line.get_ydata().max() for line in axes.get_lines()))
    for axes in panels[2:]:
        axes.set_xlabel("steps")
    titles = "; ".join(axes.get_title() for axes in panels)
    return f"{soak.title}, over {soak.samples[-1].steps} steps: {titles}."


def _images(axes: Axes, soak: Soak, steps: Sequence[int]) -> None:
    """Draw the throughput, and the medians of its first and last tenth."""
    axes.plot(steps[1:], soak.images_per_second, color=BLUE, lw=0.8)
    tenths = (0, steps[soak.tenth]), (steps[-1 - soak.tenth], steps[-1])
    for (left, right), of in zip(tenths, soak.throughput):
        axes.axvspan(left, right, color=GREY, alpha=0.25, lw=0)
        axes.plot((left, right), (of.median,) * 2, color=ORANGE, lw=2.5, solid_capstyle="butt")
    axes.set_title(f"images/s: median of the last tenth {soak.ratio:.3f} of the first")
