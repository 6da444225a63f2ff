"""Text sizes, text and boxes, as all pictures of the documentation use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gluonpar.collectives.drawing import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE, WORDS, SMALL = 13.0, 10.0, 9.5  # sizes in points


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
    """Draw a filled box; ``corner`` is its upper left one."""
    from matplotlib.patches import FancyBboxPatch

    shape = f"round,pad=0,rounding_size={radius}" if radius else "square,pad=0"
    axes.add_patch(FancyBboxPatch(corner, *size, shape, fc=colour, lw=0, alpha=alpha, gid=gid))
