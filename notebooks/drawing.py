"""The look of gluonpar's pictures, and a plan as one: a grid per step, a row per device.

The background is transparent, and every colour has a contrast of about 4 both to white and to a
nearly black page (WCAG 2 requires 3 for graphics and large text). Text is saved as outlines, so a
picture looks the same everywhere; its title and description stay text for screen readers.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

from gluonpar.collectives import ALGORITHMS, Hop, trace
from gluonpar.plans.plan import num_chunks, num_steps

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#3b7dd8", "#c8641b", "#2e8b57", "#d04545", "#8a63c9", "#14889a", "#c24a94", "#7d7a1e")
COLOURS += ("#4a5fb0", "#a0703c")
GREY = "#767c85"
# Device i has COLOURS[i]. Forward and backward have these two in every picture that shows them;
# readers who are colour-blind can tell them apart.
FORWARD_COLOUR, BACKWARD_COLOUR = COLOURS[2], COLOURS[4]
# Where hops go both ways around a ring: those to the next device, and those to the one before.
DIRECTION_COLOURS = (COLOURS[5], COLOURS[6])
_COLOURED = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor")
_COLOURED += ("xtick.color", "ytick.color", "grid.color")
SETTINGS = dict.fromkeys(_COLOURED, GREY)
SETTINGS.update({"font.family": ["DejaVu Sans"], "axes.titlesize": "medium"})  # matplotlib's font
SETTINGS.update({"figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "auto"})
SETTINGS.update({"axes.spines.top": False, "axes.spines.right": False})
SETTINGS.update({"axes.grid": True, "grid.alpha": 0.3})
SETTINGS.update({"svg.fonttype": "path", "path.simplify": False})
# In inches, as are all lengths below: of the sheet, and LANE between parallel arrows, GAP between
# grids, SPACE between rows of a grid, NARROWEST for the width of a cell.
WIDTH, LEAST_WIDTH, MARGIN, LEFT, TOP, BOTTOM = 10.0, 7.0, 0.16, 1.0, 0.4, 0.5
LANE, GAP, SPACE, NARROWEST = 0.075, 0.26, 0.1, 0.1
KEY = (
    "Each grid: the state before its step. Each band in a cell: a device whose values it contains.",
    "Solid arrow: the receiver adds the chunk. Dashed: it replaces its own.",
)
DIRECTIONS = ("Teal arrow: to the next device.", "Pink: to the one before.")


def colour_of(algorithm: str) -> str:
    """Return an algorithm's colour, the same in every picture that compares algorithms."""
    return COLOURS[list(ALGORITHMS).index(algorithm) % len(COLOURS)]


def dashes(i: int, number: int) -> tuple[float, tuple[float, ...]] | str:
    """Return the line style of line i of a number that coincide, so that each can be seen."""
    length = 10 / number  # in line widths
    return (-i * length, (length, (number - 1) * length)) if number > 1 else "-"


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
    figure: Figure,
    path: str | os.PathLike,
    title: str,
    description: str,
    language: str = "en",
) -> None:
    """Write ``figure`` to ``path``, in the format that its suffix names, within :func:`style`.

    An SVG file begins with ``title`` and ``description``, names their language and has no date.
    Raises ValueError for a format that matplotlib cannot write.
    """
    if not str(path).endswith(".svg"):
        figure.savefig(path, dpi=144)
        return
    svg, no_date = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(svg, format="svg", metadata=no_date)
    before, tag, after = re.split(r"(?<=<svg )([^>]*>)", svg.getvalue(), maxsplit=1)
    front = f'role="img" lang="{language}" aria-labelledby="title desc" {tag}\n'
    front += f' <title id="title">{escape(title)}'
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
    size: float = 13,
) -> None:
    """Draw an arrow; ``bend`` is a connection style, by default horizontal at both ends.

    ``size`` is that of the head, in points.
    """
    from matplotlib.patches import FancyArrowPatch

    bend = "arc3" if tail[1] == head[1] else bend
    line = (0, (3.2, 1.8)) if dashed else "-"
    look = {"color": colour, "lw": 0.13 * size, "ls": line, "gid": gid}
    shape = {"arrowstyle": "-|>", "mutation_scale": size, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(tail, head, connectionstyle=bend, **shape, **look))


def label_ends(axes: Axes, ends: Iterable[tuple[float, str, str]], size: float = 9) -> None:
    """Write beside the axes the names of lines that end there: y, name and colour of each.

    Names that would overlap are moved apart. The axes must have their final limits and size.
    """
    ends, apart = sorted(ends, reverse=True), 1.25 * size * axes.figure.dpi / 72
    heights = [axes.transData.transform((axes.get_xlim()[1], y))[1] for y, _, _ in ends]
    for i in range(1, len(ends)):
        heights[i] = min(heights[i], heights[i - 1] - apart)
    lowest = axes.bbox.y0
    for i in reversed(range(len(ends))):
        heights[i] = max(heights[i], lowest)
        lowest = heights[i] + apart
    for height, (_, name, colour) in zip(heights, ends):
        y = (height - axes.bbox.y0) / axes.bbox.height
        axes.text(1.03, y, name, color=colour, size=size, va="center", transform=axes.transAxes)


def draw(algorithm: str, num_devices: int, path: str | os.PathLike | None = None) -> Figure:
    """Return a picture of a plan: one grid per step and one of the result, one arrow per hop.

    A grid has a row per device and a column per chunk, and shows the state before its step: a cell
    has a band of colour for each device whose values are in its sum. ``path`` saves the picture,
    too, in the format that the suffix names. In an SVG file each hop is a group with the id
    'hop-STEP-SRC-DST-CHUNK-add' (or '-copy'), and its description is the printed table.
    """
    table = trace(algorithm, num_devices)
    title = str(table).partition("\n")[0]
    with style(title):
        figure = _picture(table.hops, num_devices, title)
        if path is not None:
            save(figure, path, title, str(table))
    return figure


def _picture(hops: Sequence[Hop], num_devices: int, title: str) -> Figure:
    """Return a figure with one grid per step, with the step's hops, and one of the result."""
    steps, chunks = num_steps(hops), num_chunks(hops)
    lanes, colours = _lanes(hops), _directions(hops, num_devices)
    width, pitch, lines = _layout(hops, LANE * (max(lanes.values(), default=0) + 2))
    height = min(max(0.36, 0.09 * num_devices), 0.6)
    band = height / num_devices  # in a cell, one per device whose values are in the cell's sum
    headings, grid = 0.54 if chunks > 1 else 0.3, chunks * pitch + GAP
    below = headings + (height + SPACE) * num_devices + 0.1  # from one line of grids to the next
    right = LEFT - GAP + grid * max(map(len, lines))
    figure, axes = sheet(max(LEAST_WIDTH, right), TOP + below * len(lines) + BOTTOM)
    axes.text(MARGIN, 0.26, title, color=GREY, size=13, weight="bold", va="center")
    sums = {(i, chunk): {i} for i in range(num_devices) for chunk in range(chunks)}
    for i, line in enumerate(lines):
        top = TOP + below * i + headings
        for device in range(num_devices):
            y, look = top + (height + SPACE) * device + height / 2, {"weight": "bold"}
            look.update(color=_colour(device), ha="right", va="center_baseline")
            axes.text(LEFT - 0.12, y, f"device {device}", **look)
        if chunks > 1:
            axes.text(LEFT - 0.12, top - 0.1, "chunk", color=GREY, size=8.5, ha="right")
        for j, step in enumerate(line):
            left, name = LEFT + grid * j, f"step {step + 1}" if step < steps else "result"
            middle = left + (width + pitch * (chunks - 1)) / 2
            axes.text(middle, top - headings + 0.2, name, color=GREY, ha="center")
            for chunk in range(chunks if chunks > 1 else 0):
                x = left + pitch * chunk + width / 2
                axes.text(x, top - 0.1, chunk, color=GREY, size=8.5, ha="center")
            cells = {at: (left + pitch * at[1], top + (height + SPACE) * at[0]) for at in sums}
            _boxes(axes, cells.values(), width, height, f"cells-{step}", fc=GREY, alpha=0.16)
            for part in range(num_devices):
                have = [(x, y + band * part) for at, (x, y) in cells.items() if part in sums[at]]
                if have:
                    _boxes(axes, have, width, band, f"values-{step}-{part}", fc=_colour(part))
            for hop in (hop for hop in hops if hop.step == step):
                src, dst = (hop.src, hop.chunk), (hop.dst, hop.chunk)
                sums[dst] = sums[src] | (sums[dst] if hop.reduce else set())
                ends = [(x + width + 0.02, y + height / 2) for x, y in (cells[src], cells[dst])]
                arm, kind = 72 * LANE * (lanes[hop] + 1), "add" if hop.reduce else "copy"
                bend = f"arc,angleA=0,angleB=0,armA={arm},armB={arm},rad=3"  # in points
                gid = f"hop-{step}-{hop.src}-{hop.dst}-{hop.chunk}-{kind}"
                colour = colours.get((hop.dst - hop.src) % num_devices, GREY)
                arrow(axes, *ends, colour, gid, dashed=not hop.reduce, bend=bend, size=8.5)
    y, x = axes.get_ylim()[0] - BOTTOM + 0.2, MARGIN
    axes.text(x, y, KEY[0], color=GREY, size=9.5)
    if hops:
        axes.text(x, y + 0.22, KEY[1], color=GREY, size=9.5)
    for i, colour in enumerate(colours.values()):
        axes.text(x + 4.95 + 2.2 * i, y + 0.22, DIRECTIONS[i], color=colour, size=9.5)
    return figure


def _directions(hops: Sequence[Hop], num_devices: int) -> dict[int, str]:
    """Return the colours of the two ways around a ring, if every step sends on all both ways."""
    both = (1, num_devices - 1)
    sent = {(hop.step, hop.src, (hop.dst - hop.src) % num_devices) for hop in hops}
    around = {
        (s, i, way) for s in range(num_steps(hops)) for i in range(num_devices) for way in both
    }
    return dict(zip(both, DIRECTION_COLOURS)) if num_devices > 2 and sent == around else {}


def _layout(hops: Sequence[Hop], gutter: float) -> tuple[float, float, list[Sequence[int]]]:
    """Return the width of a cell, the distance of columns, and the grids of every line.

    A grid is a step's number, the last one the result's. Unless all fit beside one another, the
    steps that copy begin a new line.
    """
    steps, chunks = num_steps(hops), num_chunks(hops)

    def cell(number: int) -> float:
        """The width of a cell with this number of grids beside one another."""
        return ((WIDTH - LEFT + GAP) / number - GAP) / chunks - gutter

    phases, widest = [range(steps + 1)], 0.84 if chunks == 1 else 0.42
    if cell(steps + 1) < widest:
        copies = min((hop.step for hop in hops if not hop.reduce), default=steps)
        phases = [range(copies), range(copies, steps + 1)]
    most = max(map(len, phases))
    while most > 1 and cell(most) < NARROWEST:
        most -= 1
    width = min(max(cell(most), NARROWEST), widest)
    lines = [phase[i : i + most] for phase in phases for i in range(0, len(phase), most)]
    return width, width + gutter, lines


def _lanes(hops: Sequence[Hop]) -> dict[Hop, int]:
    """Return how far from its column each hop runs, so that hops beside one another do not meet."""
    lanes: dict[Hop, int] = {}
    columns = defaultdict(list)
    for hop in sorted(hops, key=lambda hop: (abs(hop.dst - hop.src), hop)):
        column = columns[hop.step, hop.chunk]
        low, high = sorted((hop.src, hop.dst))
        taken = {
            lanes[other]
            for other in column
            if min(other.src, other.dst) <= high and low <= max(other.src, other.dst)
        }
        lanes[hop] = min(set(range(len(taken) + 1)) - taken)
        column.append(hop)
    return lanes


def _colour(device: int) -> str:
    return COLOURS[device % len(COLOURS)]


def _boxes(
    axes: Axes,
    corners: Iterable[tuple[float, float]],
    width: float,
    height: float,
    gid: str,
    **look,
) -> None:
    """Draw rectangles, given by their upper left corners, as one shape."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    edges = ((0, 0), (width, 0), (width, height), (0, height), (0, 0))
    vertices = [(x + dx, y + dy) for x, y in corners for dx, dy in edges]
    codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * (len(vertices) // 5)
    axes.add_patch(PathPatch(Outline(vertices, codes), lw=0, gid=gid, **look))
