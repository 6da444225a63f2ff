"""The data-parallel step on two devices."""

from __future__ import annotations

import math
import os
from typing import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Circle, Rectangle

from gluonpar.models.lenet import LENET_SHAPES
from gluonpar.plans import partition
from gluonpar.plans.drawing import (
    BACKWARD_COLOUR,
    COLOURS,
    FORWARD_COLOUR,
    GREY,
    arrow,
    save,
    sheet,
    style,
)

NUM_DEVICES, BATCH_SIZE = 2, 256
# The axes measure inches from the upper left corner.
WIDTH, HEIGHT, LANES_TOP, LANE = 10.0, 4.78, 0.82, 1.66
BATCH, SHARD, REPLICA, LOSSES, GRADIENTS, SUM, UPDATED = 0.96, 2.2, 3.3, 4.3, 5.3, 7.1, 9.2
TALL = 0.8  # the height of a shard and of a stack of parameter arrays
STAGES = (
    ((BATCH + SHARD) / 2, "split", "split_and_load", GREY),
    (REPLICA, "forward", "lenet(X, params)", FORWARD_COLOUR),
    ((LOSSES + GRADIENTS) / 2, "backward", "autograd.backward", BACKWARD_COLOUR),
    ((GRADIENTS + SUM) / 2, "all-reduce", "allreduce", GREY),
    ((SUM + UPDATED) / 2, "update", "sgd", GREY),
)


def draw(path: str | os.PathLike) -> None:
    """Draw one step of :func:`gluonpar.train_batch`: one lane per device, time to the right.

    The batch is split as :func:`gluonpar.split_and_load` splits it. Gradients are reduced as by the
    all-reduce 'star'.
    """
    shards = partition.slices(BATCH_SIZE, NUM_DEVICES)
    with style("step"):
        figure, axes = sheet(WIDTH, HEIGHT)
        for x, name, function, colour in STAGES:
            _text(axes, x, 0.3, name, size=13, weight="bold", color=colour)
            _text(axes, x, 0.56, function, family="DejaVu Sans Mono", color=colour)
        for device, shard in enumerate(shards):
            _split(axes, device, shard)
            _forward_and_backward(axes, device, shard.stop - shard.start)
            _update(axes, device)
        _text(axes, BATCH, _middle(0) + 1.8, f"{BATCH_SIZE} samples")
        _allreduce(axes)
        legend = "blue, orange: on one device only     grey: the same on every device"
        legend += "     dashed: copy"
        _text(axes, 1.62, HEIGHT - 0.2, legend, ha="left")
        sizes = " and ".join(str(shard.stop - shard.start) for shard in shards)
        description = (
            f"One lane per device, time to the right. A batch of {BATCH_SIZE} samples is split "
            f"into shards of {sizes}. Each device runs forward through its replica of the "
            f"{len(LENET_SHAPES)} parameter arrays, which gives one loss per sample, and backward, "
            f"which gives {len(LENET_SHAPES)} gradients. The all-reduce adds the gradients of all "
            "devices on device 0 and copies the sums to the others. Each device then updates its "
            f"own replica: params -= lr / {BATCH_SIZE} * sum."
        )
        save(figure, path, f"The data-parallel step on {NUM_DEVICES} devices", description)


def _middle(device: int) -> float:
    return LANES_TOP + 0.14 + (LANE + 0.14) * device + TALL / 2 + 0.24


def _text(axes: Axes, x: float, y: float, text: str, **settings) -> None:
    defaults = {"color": GREY, "ha": "center", "va": "center", "size": 9.5}
    axes.text(x, y, text, **{**defaults, **settings})


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, **more) -> None:
    """A filled rectangle around ``x``, from ``y`` down."""
    axes.add_patch(Rectangle((x - width / 2, y), width, height, fc=colour, lw=0, **more))


def _stack(axes: Axes, x: float, device: int, colours: Sequence[str], gid: str) -> None:
    """One box per parameter array, the taller the more elements it has."""
    sizes = [1 + math.log10(math.prod(shape)) for shape in LENET_SHAPES]
    gap, top = 0.02, _middle(device) - TALL / 2
    unit, width = (TALL - gap * (len(sizes) - 1)) / sum(sizes), 0.34 / len(colours)
    for i, size in enumerate(sizes):
        for j, colour in enumerate(colours):
            left = x + (j - (len(colours) - 1) / 2) * width
            _box(axes, left, top, width, unit * size, colour, gid=f"{gid}-{device}-{i}-{j}")
        top += unit * size + gap


def _split(axes: Axes, device: int, shard: slice) -> None:
    """The device's lane, and its part of the batch."""
    colour, middle = COLOURS[device], _middle(device)
    left, width = 1.62, WIDTH - 1.7
    _box(axes, left + width / 2, middle - 0.78, width, LANE, GREY, alpha=0.11)
    _text(
        axes, left + 0.12, middle - 0.6, f"device {device}", color=colour, ha="left", weight="bold"
    )
    height = 1.5 * (shard.stop - shard.start) / BATCH_SIZE
    top = _middle(0) + 0.15 + 1.5 * shard.start / BATCH_SIZE
    _box(axes, BATCH, top, 0.34, height - 0.03, colour, gid=f"batch-{device}")
    label = f"{shard.start}–{shard.stop - 1}"
    _text(axes, BATCH - 0.25, top + height / 2, label, ha="right", color=colour)
    arrow(axes, (BATCH + 0.22, top + height / 2), (SHARD - 0.2, middle), colour)


def _forward_and_backward(axes: Axes, device: int, num_samples: int) -> None:
    colour, middle, below = COLOURS[device], _middle(device), _middle(device) + 0.56
    _box(axes, SHARD, middle - TALL / 2, 0.34, TALL, colour, gid=f"shard-{device}")
    _stack(axes, REPLICA, device, [GREY], "params")
    _box(axes, LOSSES, middle - TALL / 2, 0.12, TALL, colour, gid=f"losses-{device}")
    _stack(axes, GRADIENTS, device, [colour], "grads")
    for left, right, stage in (
        (SHARD, REPLICA, FORWARD_COLOUR),
        (REPLICA, LOSSES, FORWARD_COLOUR),
        (LOSSES, GRADIENTS, BACKWARD_COLOUR),
    ):
        arrow(axes, (left + 0.22, middle), (right - 0.2, middle), stage)
    _text(axes, SHARD, below, f"{num_samples} samples")
    _text(axes, REPLICA, below, f"replica {device}")
    _text(axes, LOSSES, below, f"{num_samples} losses")
    _text(axes, GRADIENTS, below, f"{len(LENET_SHAPES)} gradients")


def _allreduce(axes: Axes) -> None:
    """Device 0 adds the other device's gradients to its own and sends the sum back."""
    first, other = _middle(0), _middle(1)
    left, right, plus, radius = GRADIENTS + 0.22, SUM - 0.2, 6.05, 0.12
    arrow(axes, (left, first), (plus - radius, first), COLOURS[0])
    arrow(axes, (plus + radius, first), (right, first), GREY)
    bends = ("angle3,angleA=0,angleB=90", "angle3,angleA=90,angleB=0")
    arrow(axes, (left, other), (plus, first + radius), COLOURS[1], bend=bends[0])
    axes.add_patch(Circle((plus, first), radius, fc=GREY, lw=0))
    _text(axes, plus, first, "+", color="white", size=13, weight="bold")
    arrow(axes, (6.42, first), (right, other), GREY, dashed=True, bend=bends[1])
    for device in range(NUM_DEVICES):
        _stack(axes, SUM, device, COLOURS[:NUM_DEVICES], "sum")
        _text(axes, SUM, _middle(device) + 0.56, "sum of gradients")


def _update(axes: Axes, device: int) -> None:
    x, middle = (SUM + UPDATED) / 2, _middle(device)
    arrow(axes, (SUM + 0.22, middle), (UPDATED - 0.2, middle), GREY)
    _text(axes, x, middle - 0.17, "params -=", family="DejaVu Sans Mono")
    _text(axes, x, middle + 0.17, f"lr / {BATCH_SIZE} * sum", family="DejaVu Sans Mono")
    _stack(axes, UPDATED, device, [GREY], "updated")
    _text(axes, UPDATED, middle + 0.56, f"replica {device}, updated")
