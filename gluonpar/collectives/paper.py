"""What all pictures share: colours for white and dark pages, words, and the SVG that is written.

A picture has no background: the page shows through. So every colour is of middle brightness and
has a contrast of about 4 both to white and to nearly black (WCAG 2's ratio; 3 is the least for
large words and for what is drawn). Words are drawn with the font that matplotlib brings, as
outlines, so a picture looks the same wherever it is shown; its title and description are text.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#3b7dd8", "#c8641b", "#2e8b57", "#d04545", "#8a63c9", "#14889a", "#c24a94", "#7d7a1e")
GREY, LIGHT_GREY = "#767c85", "#c9d1d9"  # the second one for pages that are always dark
TITLE, WORDS, SMALL = 13.0, 10.0, 9.5  # sizes in points
HEAD = 0.1  # of an arrow, in inches
SETTINGS = {
    "font.family": ["DejaVu Sans"],
    "font.size": WORDS,
    "svg.fonttype": "path",
    "path.simplify": False,
}
_COLOURED = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor")
_COLOURED += ("xtick.color", "ytick.color", "grid.color")
CHART = {**dict.fromkeys(_COLOURED, GREY), "axes.titlesize": SMALL, "font.size": SMALL}
CHART.update({"figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "auto"})
CHART.update({"axes.spines.top": False, "axes.spines.right": False})
CHART.update({"axes.grid": True, "grid.alpha": 0.3})


@contextlib.contextmanager
def style(salt: str) -> Iterator[None]:
    """Draw and save within this, and the same ``salt`` gives the same bytes.

    Nothing of matplotlib's global state stays changed. Raises ImportError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            f"drawing needs matplotlib ({error}): pip install 'gluonpar[plot]'"
        ) from error
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": salt}):
        yield


@contextlib.contextmanager
def chart(salt: str) -> Iterator[None]:
    """:func:`style`, for what has axes: grey lines and words on no background."""
    with style(salt):
        from matplotlib import rc_context

        with rc_context(CHART):
            yield


def sheet(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure and its only axes, which measure inches from the upper left corner."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def words(axes: Axes, x: float, y: float, text: Any, **more: Any) -> None:
    """Write ``text`` at (x, y), in grey and centred unless ``more`` says otherwise."""
    axes.text(x, y, text, **{"color": GREY, "ha": "center", "va": "center", **more})


def box(
    axes: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    colour: str,
    gid: str | None = None,
    alpha: float = 1.0,
    radius: float = 0.04,
) -> None:
    """A filled box; ``corner`` is the upper left one."""
    from matplotlib.patches import FancyBboxPatch

    shape = f"round,pad=0,rounding_size={radius}" if radius else "square,pad=0"
    axes.add_patch(FancyBboxPatch(corner, *size, shape, fc=colour, lw=0, alpha=alpha, gid=gid))


def arrow(
    axes: Axes,
    tail: tuple[float, float],
    head: tuple[float, float],
    colour: str,
    gid: str | None = None,
    dashed: bool = False,
    steep: str = "",
) -> None:
    """A curve from ``tail`` to ``head``, level at both ends but for a ``steep`` 'tail' or 'head'.

    Level at the ends, it keeps clear of what is between them; the head always points along it.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    (left, y), (right, end) = tail, head
    across, along = 0.42 * (right - left), (0.8 if steep == "tail" else 0.5) * (end - y)
    first = (left, y + along) if steep == "tail" else (left + across, y)
    last = (right, end - along) if steep == "head" else (right - across, end)
    tip = HEAD if steep != "head" else 0.0
    stop = (right - tip, end) if tip else (right, end - math.copysign(HEAD, along))
    path = Path([tail, first, last, stop], [Path.MOVETO] + [Path.CURVE4] * 3)
    dashes = (0, (3.2, 1.8)) if dashed else "-"
    axes.add_patch(PathPatch(path, fc="none", ec=colour, lw=1.7, ls=dashes, gid=gid))
    marker = ">" if tip else "v" if along > 0 else "^"
    middle = (right - tip / 2, end) if tip else (right, end - math.copysign(HEAD / 2, along))
    axes.plot(*middle, marker=marker, ms=72 * HEAD, color=colour, mew=0)


def save(
    figure: Figure, path: str | os.PathLike, title: str, description: str, dpi: float = 144
) -> None:
    """Write the figure to ``path``; within :func:`style`.

    An SVG has ``title`` and ``description`` in front, which is what a screen reader reads, and no
    date. For other endings those are left out. Raises ValueError for an ending that matplotlib
    does not know, and OSError where the disk refuses.
    """
    if not str(path).endswith(".svg"):
        figure.savefig(path, dpi=dpi)
        return
    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(text, format="svg", metadata=nothing)
    Path(path).write_text(described(text.getvalue(), title, description), "utf-8")


def described(svg: str, title: str, description: str) -> str:
    """The SVG with a title and a description as the first things in it, and without empty ends.

    >>> print(described("<svg viewBox='0 0 1 1'><g/> \\n</svg>", "a & b", "c"))
    <svg role="img" aria-labelledby="title desc" viewBox='0 0 1 1'>
     <title id="title">a &amp; b</title>
     <desc id="desc">c</desc><g/>
    </svg>
    """
    start = re.search(r"<svg\b[^>]*>", svg)
    if start is None:
        raise ValueError("there is no <svg> element to describe; give the text of an SVG file")
    opened = '<svg role="img" aria-labelledby="title desc"' + start.group()[len("<svg") :]
    front = f'{opened}\n <title id="title">{escape(title)}</title>'
    front += f'\n <desc id="desc">{escape(description)}</desc>'
    return re.sub(r"[ \t]+$", "", svg[: start.start()] + front + svg[start.end() :], flags=re.M)


def luminance(colour: str) -> float:
    """Relative luminance of '#rrggbb' after WCAG 2, from 0 for black to 1 for white."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(colour: str, other: str) -> float:
    """WCAG 2's contrast ratio of two colours '#rrggbb', from 1 to 21.

    >>> round(contrast("#ffffff", "#000000")), round(contrast(GREY, "#ffffff"), 1)
    (21, 4.2)
    """
    dark, light = sorted((luminance(colour), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
