"""A plan as a picture: one lane per device, one column per step, one arrow per hop.

The background is transparent, and every colour has a contrast of about 4 both to white and to a
nearly black page (WCAG 2 requires 3 for graphics and large text). Text is saved as outlines, so a
picture looks the same everywhere; its title and description stay text for screen readers.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import defaultdict
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Iterator, Sequence
from xml.sax.saxutils import escape

from gluonpar.collectives.plan import Hop, num_chunks, num_steps

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#3b7dd8", "#c8641b", "#2e8b57", "#d04545", "#8a63c9", "#14889a", "#c24a94", "#7d7a1e")
GREY, LIGHT_GREY = "#767c85", "#c9d1d9"  # the light one is for pages that are always dark
_COLOURED = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor")
_COLOURED += ("xtick.color", "ytick.color", "grid.color")
SETTINGS = dict.fromkeys(_COLOURED, GREY)
SETTINGS.update({"font.family": ["DejaVu Sans"], "axes.titlesize": "medium"})  # matplotlib's font
SETTINGS.update({"figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "auto"})
SETTINGS.update({"axes.spines.top": False, "axes.spines.right": False})
SETTINGS.update({"axes.grid": True, "grid.alpha": 0.3})
SETTINGS.update({"svg.fonttype": "path", "path.simplify": False})
STEP, LEFT, TOP, BOTTOM = 1.2, 0.85, 0.85, 0.45  # in inches, as are all lengths below
RADIUS, SPACING, MARGIN, LEAST_WIDTH = 0.1, 0.27, 0.16, 7.5


@contextlib.contextmanager
def style(salt: str) -> Iterator[None]:
    """Apply the settings of gluonpar's pictures to matplotlib, and restore the user's afterwards.

    With the same ``salt``, a picture is saved as the same bytes every time. Raises ImportError
    without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib ({error}): pip install matplotlib") from error
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": salt}):
        yield


def save(
    figure: Figure, path: str | os.PathLike, title: str, description: str, dpi: float = 144
) -> None:
    """Write ``figure`` to ``path``, in the format that its suffix names, within :func:`style`.

    An SVG file begins with ``title`` and ``description`` and has no date. Raises ValueError for a
    format that matplotlib cannot write.
    """
    if not str(path).endswith(".svg"):
        figure.savefig(path, dpi=dpi)
        return
    text, no_date = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(text, format="svg", metadata=no_date)
    before, tag, after = re.split(r"(?<=<svg )([^>]*>)", text.getvalue(), maxsplit=1)
    front = f'role="img" aria-labelledby="title desc" {tag}\n <title id="title">{escape(title)}'
    front += f'</title>\n <desc id="desc">{escape(description)}</desc>'
    Path(path).write_text(re.sub(r"[ \t]+$", "", before + front + after, flags=re.M), "utf-8")


def sheet(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure and its only axes, which measure inches from the upper left corner."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def arrow(
    axes: Axes,
    tail: tuple[float, float],
    head: tuple[float, float],
    colour: str,
    gid: str | None = None,
    dashed: bool = False,
    bend: str = "arc,angleA=0,angleB=180,armA=18,armB=18,rad=12",
) -> None:
    """Draw an arrow; ``bend`` is a connection style, by default horizontal at both ends."""
    from matplotlib.patches import FancyArrowPatch

    bend = "arc3" if tail[1] == head[1] else bend
    look = {"color": colour, "lw": 1.7, "ls": (0, (3.2, 1.8)) if dashed else "-", "gid": gid}
    shape = {"arrowstyle": "-|>", "mutation_scale": 13, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(tail, head, connectionstyle=bend, **shape, **look))


def picture(hops: Sequence[Hop], num_devices: int, title: str, dark: bool) -> Figure:
    """Return a figure of the hops, the device numbers and the step numbers."""
    from matplotlib.patches import Rectangle

    grey, steps = LIGHT_GREY if dark else GREY, num_steps(hops)
    tails, heads = _stacked(hops, "src"), _stacked(hops, "dst")
    lane = MARGIN + SPACING * (2 * max([0.0, *tails.values(), *heads.values()]) + 1.5)
    furthest = max((abs(hop.dst - hop.src) for hop in hops), default=0)
    column = max(STEP, STEP / 2 + 0.3 * lane * furthest, (LEAST_WIDTH - LEFT) / max(1, steps))
    width = column * max(1, steps)
    figure, axes = sheet(LEFT + width + MARGIN, TOP + lane * num_devices + BOTTOM)
    axes.text(LEFT, 0.26, title, color=grey, size=13, weight="bold", va="center")
    for i in range(num_devices):
        corner, middle = (LEFT, TOP + lane * i + MARGIN / 4), TOP + lane * (i + 0.5)
        axes.add_patch(Rectangle(corner, width, lane - MARGIN / 2, fc=grey, lw=0, alpha=0.13))
        axes.text(LEFT - 0.1, middle, f"device {i}", color=grey, ha="right", va="center")
    for step in range(steps):
        x = LEFT + column * (step + 0.5)
        axes.text(x, TOP - 0.17, f"step {step}", color=grey, ha="center")
    for hop in hops:
        left, src, dst = LEFT + column * hop.step, *(lane * (i + 0.5) for i in (hop.src, hop.dst))
        tail = left + 2 * RADIUS, TOP + src + SPACING * tails[hop]
        head = left + column - 1.5 * RADIUS, TOP + dst + SPACING * heads[hop]
        colour, kind = COLOURS[hop.chunk % len(COLOURS)], "add" if hop.reduce else "copy"
        gid = f"hop-{hop.step}-{hop.src}-{hop.dst}-{hop.chunk}-{kind}"
        arrow(axes, tail, head, colour, gid, dashed=not hop.reduce)
        axes.plot(*tail, marker="o", ms=144 * RADIUS, color=colour, mew=0)
        axes.text(
            *tail, hop.chunk, color="white", size=8.5, weight="bold", ha="center", va="center"
        )
    chunk = f"one of {num_chunks(hops)} chunks" if num_chunks(hops) > 1 else "the whole array"
    key = f"circle: {chunk}     solid arrow: added to the receiver's     dashed: replaces it"
    text = key if hops else "one device has nothing to send"
    axes.text(LEFT, axes.get_ylim()[0] - BOTTOM / 2, text, color=grey, va="center")
    return figure


def _stacked(hops: Sequence[Hop], end: str) -> dict[Hop, float]:
    """Each hop's place on the lane of its ``end``: hops of one step are stacked around 0."""
    groups = defaultdict(list)
    for hop in sorted(hops, key=attrgetter("dst" if end == "src" else "src", "chunk")):
        groups[hop.step, getattr(hop, end)].append(hop)
    return {
        hop: i - (len(group) - 1) / 2 for group in groups.values() for i, hop in enumerate(group)
    }
