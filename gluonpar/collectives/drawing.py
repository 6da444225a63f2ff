"""Hops drawn as a picture: a lane a device, a column a step, an arrow a hop."""

from __future__ import annotations

import itertools
from collections import defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING, Sequence

from gluonpar.collectives.paper import COLOURS, GREY, LIGHT_GREY, arrow, box, sheet
from gluonpar.collectives.plan import Hop, num_chunks, num_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP, LEFT, TOP, BOTTOM = 1.2, 0.85, 0.85, 0.55  # of the picture, in inches, as all lengths below
RADIUS, SPACING, MARGIN, LEAST_WIDTH = 0.1, 0.27, 0.16, 7.5


def picture(hops: Sequence[Hop], num_devices: int, title: str, dark: bool) -> Figure:
    """The hops as arrows; the figure's only axes measure inches from the upper left corner."""
    tails, heads = (_places(hops, end) for end in ("src", "dst"))
    most = 2 * max([0.0, *tails.values(), *heads.values()]) + 1
    lane = MARGIN + SPACING * (most + 0.5)
    edges = _edges(hops, lane)
    figure, axes = sheet(edges[-1] + MARGIN, TOP + lane * num_devices + BOTTOM)
    grey = LIGHT_GREY if dark else GREY
    axes.text(LEFT, 0.26, title, color=grey, size=13, weight="bold", va="center")
    _lanes(axes, num_devices, grey, lane)
    _steps(axes, hops, grey, edges)
    _legend(axes, hops, grey)
    for hop in hops:
        left, right = edges[hop.step] + 2 * RADIUS, edges[hop.step + 1] - 1.5 * RADIUS
        src, dst = (TOP + lane * (i + 0.5) for i in (hop.src, hop.dst))
        tail, head = (left, src + SPACING * tails[hop]), (right, dst + SPACING * heads[hop])
        _arrow(axes, hop, tail, head)
    return figure


def _edges(hops: Sequence[Hop], lane: float) -> list[float]:
    """Where the steps' columns begin and the last one ends: the further a hop goes, the wider."""
    widths = [STEP] * max(1, num_steps(hops))
    for hop in hops:
        widths[hop.step] = max(widths[hop.step], STEP / 2 + 0.3 * lane * abs(hop.dst - hop.src))
    stretch = max(1.0, (LEAST_WIDTH - LEFT) / sum(widths))
    return list(itertools.accumulate([LEFT] + [width * stretch for width in widths]))


def _places(hops: Sequence[Hop], end: str) -> dict[Hop, float]:
    """Where a hop begins or ends on its lane: those of a step are stacked, 0 is the middle."""
    groups = defaultdict(list)
    for hop in sorted(hops, key=attrgetter("dst" if end == "src" else "src", "chunk")):
        groups[hop.step, getattr(hop, end)].append(hop)
    return {
        hop: i - (len(group) - 1) / 2 for group in groups.values() for i, hop in enumerate(group)
    }


def _lanes(axes, num_devices: int, grey: str, lane: float) -> None:
    size = axes.get_xlim()[1] - LEFT - MARGIN, lane - MARGIN / 2
    for i in range(num_devices):
        middle = TOP + lane * (i + 0.5)
        box(axes, (LEFT, middle - size[1] / 2), size, grey, alpha=0.13, radius=0)
        axes.text(LEFT - 0.1, middle, f"device {i}", color=grey, ha="right", va="center")
    if num_devices == 1:
        axes.text(LEFT + 0.2, TOP + lane / 2, "there is nothing to send", color=grey, va="center")


def _steps(axes, hops: Sequence[Hop], grey: str, edges: list[float]) -> None:
    for s in range(num_steps(hops)):
        axes.text((edges[s] + edges[s + 1]) / 2, TOP - 0.17, f"step {s}", color=grey, ha="center")


def _legend(axes, hops: Sequence[Hop], grey: str) -> None:
    from matplotlib.lines import Line2D

    if not hops:
        return
    chunks = num_chunks(hops)
    chunk = f"a chunk, one of {chunks}" if chunks > 1 else "the array"
    kinds = [
        Line2D([], [], color=grey, marker="o", ls="", ms=144 * RADIUS, mew=0, label=chunk),
        Line2D([], [], color=grey, label="added to the receiver's"),
        Line2D([], [], color=grey, ls="--", label="replaces the receiver's"),
    ]
    width, height = axes.get_xlim()[1], axes.get_ylim()[0]
    axes.legend(
        handles=kinds,
        loc="center left",
        bbox_to_anchor=((LEFT - 0.05) / width, BOTTOM / 2 / height),
        borderpad=0,
        ncol=3,
        frameon=False,
        labelcolor=grey,
    )


def _arrow(axes, hop: Hop, tail: tuple[float, float], head: tuple[float, float]) -> None:
    """A circle with the chunk's number, and an arrow from it to the receiver."""
    colour = COLOURS[hop.chunk % len(COLOURS)]
    name = f"hop-{hop.step}-{hop.src}-{hop.dst}-{hop.chunk}-{'add' if hop.reduce else 'copy'}"
    arrow(axes, tail, head, colour, name, dashed=not hop.reduce)
    axes.plot(*tail, marker="o", ms=144 * RADIUS, color=colour, mew=0)
    axes.text(*tail, hop.chunk, color="white", size=8.5, weight="bold", ha="center", va="center")


def description(hops: Sequence[Hop], num_devices: int) -> str:
    """The picture in words: a sentence a step."""
    sentences = [f"A lane for each of {num_devices} devices, a column for each step."]
    for step in range(num_steps(hops)):
        sent = "; ".join(
            f"device {hop.src} sends chunk {hop.chunk} to {hop.dst}, which "
            + ("adds it" if hop.reduce else "copies it")
            for hop in hops
            if hop.step == step
        )
        sentences.append(f"Step {step}: {sent}.")
    return " ".join(sentences)
