"""The data-parallel step, drawn: what becomes of a batch on K devices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Sequence

from gluonpar.collectives import partition, trace
from gluonpar.collectives.drawing import COLOURS, GREY, arrow, save, sheet, style
from gluonpar.models.lenet import LENET_SHAPES
from pictures.paper import SMALL, TITLE, box, words

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches from the upper left corner; HEIGHT, THICK and THIN are those of what stands for arrays.
WIDTH, TOP, LANE, GAP, BOTTOM = 10.0, 0.82, 1.66, 0.14, 0.36
LANE_LEFT, LANE_RIGHT = 1.62, WIDTH - 0.08
BATCH, SHARD, REPLICA, LOSSES, GRADIENTS, SUM, UPDATED = 0.96, 2.2, 3.3, 4.3, 5.3, 7.2, 9.3
HEIGHT, THICK, THIN = 0.8, 0.34, 0.12

VERBS = (
    ((BATCH + SHARD) / 2, "split", "split_and_load"),
    (REPLICA, "forward", "lenet(X, params)"),
    ((LOSSES + GRADIENTS) / 2, "backward", "autograd.backward"),
    ((GRADIENTS + SUM) / 2, "all-reduce", "allreduce"),
    ((SUM + UPDATED) / 2, "update", "sgd"),
)


def draw_step(
    num_devices: int = 2,
    batch_size: int = 256,
    path: str | os.PathLike | None = None,
    shapes: Sequence[Sequence[int]] = LENET_SHAPES,
) -> Figure:
    """The step of :func:`gluonpar.train_batch` on ``num_devices`` devices, a lane for each.

    The batch is cut as :func:`gluonpar.split_and_load` cuts it, gradients travel as in the plan of
    the all-reduce 'star', and there are as many arrays as ``shapes``, those of the parameters, each
    the higher the more numbers it has. What is of one device has its colour, what is the same on
    all devices is grey, and a sum has the colours of all. Written to ``path`` too, if given. Raises
    ValueError for less than one device or fewer samples than devices, ImportError without
    matplotlib.
    """
    if not 1 <= num_devices <= batch_size:
        raise ValueError(
            f"num_devices={num_devices}, batch_size={batch_size}; give one device or more and at "
            "least one sample each"
        )
    with style("step"):
        bottom = TOP + num_devices * (LANE + GAP)
        figure, axes = sheet(WIDTH, bottom + BOTTOM)
        for x, verb, name in VERBS:
            words(axes, x, 0.3, verb, size=TITLE, weight="bold")
            words(axes, x, 0.56, name, size=SMALL, family="DejaVu Sans Mono")
        for device in range(num_devices):
            _lane(axes, device)
        _batch(axes, num_devices, batch_size)
        sizes = partition.sizes(batch_size, num_devices)
        for device, num_samples in enumerate(sizes):
            _replica(axes, device, num_samples, shapes)
        _exchange(axes, num_devices, shapes)
        for device in range(num_devices):
            _update(axes, device, batch_size, shapes)
        words(axes, LANE_LEFT, bottom + 0.16, _legend(num_devices), ha="left", size=SMALL)
        if path is not None:
            save(figure, path, *_description(sizes, len(shapes)))
    return figure


def _legend(num_devices: int) -> str:
    same = "the same bits on every device" if num_devices > 1 else "parameters"
    gap = " " * 5
    return gap.join(("in colour: a device's own", f"grey: {same}", "dashed: a copy"))


def _description(sizes: Sequence[int], num_arrays: int) -> tuple[str, str]:
    """Title and description for those who do not see the picture."""
    k, n = len(sizes), sum(sizes)
    many = f"{k} devices" if k > 1 else "1 device"
    shards = " and ".join(map(str, sizes))
    return f"The data-parallel step on {many}", (
        f"A lane for each device, time to the right. A batch of {n} samples is split into shards "
        f"of {shards}. Each device runs its shard forward through its replica of the "
        f"{num_arrays} parameter arrays, which gives a loss a sample, and backward, which gives "
        f"{num_arrays} gradients. The all-reduce adds the gradients of all devices on device 0 and "
        f"copies their sum to every device. Each device then subtracts lr / {n} times that sum "
        "from its replica, so all replicas keep the same bits."
    )


def _middle(device: int) -> float:
    return TOP + device * (LANE + GAP) + LANE / 2 - 0.04


def _lane(axes: Axes, device: int) -> None:
    top = TOP + device * (LANE + GAP)
    box(axes, (LANE_LEFT, top), (LANE_RIGHT - LANE_LEFT, LANE), GREY, None, 0.11, radius=0.08)
    where = {"ha": "left", "weight": "bold", "color": COLOURS[device % len(COLOURS)]}
    words(axes, LANE_LEFT + 0.12, top + 0.19, f"device {device}", **where)


def _batch(axes: Axes, num_devices: int, batch_size: int) -> None:
    """The batch, cut at the real places, and an arrow from each part to its shard."""
    middle = (_middle(0) + _middle(num_devices - 1)) / 2
    full = HEIGHT * (1 + 0.9 * (num_devices > 1))
    top, left = middle - full / 2, BATCH - THICK / 2
    for device, part in enumerate(partition.slices(batch_size, num_devices)):
        colour, last = COLOURS[device % len(COLOURS)], part.stop - 1
        start, end = (top + full * i / batch_size for i in (part.start, part.stop))
        size = THICK, end - start - 0.03
        box(axes, (left, start + 0.015), size, colour, f"batch-{device}")
        rows = f"{last}" if part.start == last else f"{part.start}\u2013{last}"
        there = (start + end) / 2
        words(axes, left - 0.08, there, rows, ha="right", size=SMALL, color=colour)
        tail, head = (left + THICK + 0.05, there), (SHARD - THICK / 2 - 0.02, _middle(device))
        arrow(axes, tail, head, colour, f"split-{device}")
    words(axes, BATCH, top - 0.17, "X, y")
    words(axes, BATCH, top + full + 0.17, f"{batch_size} samples")


def _replica(axes: Axes, device: int, num_samples: int, shapes: Sequence[Sequence[int]]) -> None:
    """A lane up to its gradients: shard, parameters, losses, gradients."""
    colour, y = COLOURS[device % len(COLOURS)], _middle(device)
    for name, x, width in (("shard", SHARD, THICK), ("losses", LOSSES, THIN)):
        box(axes, (x - width / 2, y - HEIGHT / 2), (width, HEIGHT), colour, f"{name}-{device}")
    _arrays(axes, REPLICA, y, shapes, [GREY], f"params-{device}")
    _arrays(axes, GRADIENTS, y, shapes, [colour], f"grads-{device}")
    for name, tail, head in (
        ("forward", SHARD + THICK / 2, REPLICA - THICK / 2),
        ("loss", REPLICA + THICK / 2, LOSSES - THIN / 2),
        ("backward", LOSSES + THIN / 2, GRADIENTS - THICK / 2),
    ):
        arrow(axes, (tail + 0.05, y), (head - 0.02, y), colour, f"{name}-{device}")
    _below(axes, device, SHARD, f"{num_samples} samples")
    _below(axes, device, REPLICA, f"replica {device}:\n{len(shapes)} arrays")
    _below(axes, device, LOSSES, f"{num_samples} losses")
    _below(axes, device, GRADIENTS, f"{len(shapes)} gradients")


def _exchange(axes: Axes, num_devices: int, shapes: Sequence[Sequence[int]]) -> None:
    """The star's hops between the gradients and their sums."""
    colours = [COLOURS[i % len(COLOURS)] for i in range(num_devices)]
    hops, y = trace("star", num_devices).hops, _middle(0)
    for device in range(num_devices):
        _arrays(axes, SUM, _middle(device), shapes, colours, f"sum-{device}")
        _below(axes, device, SUM, "their sum" if num_devices > 1 else "alone")
    left, right = GRADIENTS + THICK / 2 + 0.05, SUM - THICK / 2 - 0.02
    arrow(axes, (left, y), (right, y), GREY, "own")
    for hop in hops:
        x = left + (right - left) * (hop.step + (0.8 if hop.reduce else 0.3)) / len(hops)
        gid = f"hop-{hop.step}-{hop.src}-{hop.dst}-{hop.chunk}-{'add' if hop.reduce else 'copy'}"
        if hop.reduce:
            tail, head = (left, _middle(hop.src)), (x, y + 0.1)
            arrow(axes, tail, head, colours[hop.src], gid, bend="angle3,angleA=0,angleB=90")
            axes.plot(x, y, marker="o", ms=14, color=GREY, mew=0)
            words(axes, x, y, "+", color="white", size=TITLE, weight="bold")
        else:
            head = right, _middle(hop.dst)
            arrow(axes, (x, y), head, GREY, gid, dashed=True, bend="angle3,angleA=90,angleB=0")


def _update(axes: Axes, device: int, batch_size: int, shapes: Sequence[Sequence[int]]) -> None:
    y, middle = _middle(device), (SUM + UPDATED) / 2
    tail, head = (SUM + THICK / 2 + 0.05, y), (UPDATED - THICK / 2 - 0.02, y)
    arrow(axes, tail, head, GREY, f"update-{device}")
    for below, text in ((-0.17, "params -="), (0.17, f"lr / {batch_size} * sum")):
        words(axes, middle, y + below, text, size=SMALL, family="DejaVu Sans Mono")
    _arrays(axes, UPDATED, y, shapes, [GREY], f"updated-{device}")
    _below(axes, device, UPDATED, f"replica {device},\nupdated")


def _below(axes: Axes, device: int, x: float, text: str) -> None:
    """What stands at ``x`` in the device's lane, in words."""
    words(axes, x, _middle(device) + HEIGHT / 2 + 0.07, text, size=SMALL, va="top")


def _arrays(
    axes: Axes,
    x: float,
    y: float,
    shapes: Sequence[Sequence[int]],
    colours: Sequence[str],
    gid: str,
) -> None:
    """A box an array, one above the other, each with all ``colours`` side by side."""
    heights = [1 + math.log10(math.prod(shape)) for shape in shapes]
    space, width = 0.02, THICK / len(colours)
    unit = (HEIGHT - space * (len(shapes) - 1)) / sum(heights)
    top = y - HEIGHT / 2
    for i, height in enumerate(heights):
        for j, colour in enumerate(colours):
            corner = x - THICK / 2 + j * width, top
            box(axes, corner, (width, unit * height), colour, f"{gid}-{i}-{j}", radius=0)
        top += unit * height + space
