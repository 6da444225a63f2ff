"""A soak as four small pictures over its steps: memory, threads, descriptors, images/s."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

from benchmarks.training.steady import MB, Soak
from gluonpar.collectives.drawing import COLOURS, GREY, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE = COLOURS[0], COLOURS[1]
WIDTH, HEIGHT = 8.0, 4.5  # inches, of one soak


def draw(path: str, soaks: Sequence[Soak]) -> None:
    """Draw the soaks, one below the other, to the file ``path``.

    The background is transparent, and the colours read on white and on black. Every axis begins at
    0, so that what is flat looks flat. An SVG says in words what its pictures' titles say.
    """
    title = "; ".join(soak.title for soak in soaks)
    with style(title):
        from matplotlib.figure import Figure

        figure = Figure((WIDTH, HEIGHT * len(soaks)), layout="constrained")
        parts = figure.subfigures(len(soaks), squeeze=False, hspace=0.05)[:, 0]
        words = [_panels(part, soak) for part, soak in zip(parts, soaks)]
        save(figure, path, title, " ".join(words), dpi=120)


def _panels(part: Any, soak: Soak) -> str:
    """One soak: what it was, and the four pictures; the same in words."""
    part.set_facecolor("none")
    part.suptitle(soak.title, fontweight="bold")
    (memory, threads), (descriptors, images) = part.subplots(2, 2, sharex=True)
    _memory(memory, soak)
    _counts(threads, "threads", soak)
    _counts(descriptors, "descriptors", soak)
    _images(images, soak)
    for axes in (memory, threads, descriptors, images):
        axes.locator_params("x", nbins=5, integer=True)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.2 * max(line.get_ydata().max() for line in axes.get_lines()))
    for axes in (descriptors, images):
        axes.set_xlabel("steps")
    titles = [axes.get_title() for axes in (memory, threads, descriptors, images)]
    return f"{soak.title}, over {soak.samples[-1].steps} steps: {'; '.join(titles)}."


def _memory(axes: Axes, soak: Soak) -> None:
    """Resident memory, and the line that tells its growth."""
    every, (slope, start) = [soak.warm, *soak.samples], soak.line
    resident = [sample.resident_bytes / MB for sample in every]
    axes.plot([sample.steps for sample in every], resident, color=BLUE, lw=4, alpha=0.6)
    ends = soak.samples[soak.tenth].steps, soak.samples[-1].steps
    axes.plot(ends, [(start + slope * end) / MB for end in ends], color=ORANGE, lw=1)
    axes.set_title(f"resident MB: {soak.growth / MB:+.1f} over the last nine tenths")


def _counts(axes: Axes, what: str, soak: Soak) -> None:
    """How many threads or descriptors there were."""
    every = [soak.warm, *soak.samples]
    counts = [getattr(sample, what) for sample in every]
    axes.plot([sample.steps for sample in every], counts, color=BLUE)
    axes.locator_params("y", nbins=5, integer=True)
    axes.set_title(f"{what}: {counts[0]} after the warm-up, {counts[-1]} at the end")


def _images(axes: Axes, soak: Soak) -> None:
    """Throughput, with the first and the last tenth shaded and their medians drawn."""
    steps = [sample.steps for sample in soak.samples]
    axes.plot(steps, soak.images_per_second, color=BLUE, lw=0.8)
    ends = [0, *steps]
    tenths = (0, ends[soak.tenth]), (ends[-1 - soak.tenth], ends[-1])
    for (left, right), of in zip(tenths, soak.throughput):
        axes.axvspan(left, right, color=GREY, alpha=0.25, lw=0)
        axes.plot((left, right), (of.median,) * 2, color=ORANGE, lw=2.5, solid_capstyle="butt")
    axes.set_title(f"images/s: median of the last tenth {soak.ratio:.3f} of the first")
