"""The data-parallel step on two devices."""

from __future__ import annotations

import math
import os
import warnings
from typing import NamedTuple

import matplotlib
from drawing import (
    BACKWARD_COLOUR,
    COLOURS,
    FORWARD_COLOUR,
    GREY,
    arrow,
    save,
    sheet,
    style,
)
from matplotlib.axes import Axes
from matplotlib.patches import Circle, Rectangle

from gluonpar.models.lenet import LENET_SHAPES
from gluonpar.plans import partition

NUM_DEVICES, BATCH_SIZE = 2, 256
LEGEND_WIDTHS = (1.65, 1.65, 1.68, 1.05, 1.15, 1.0)
# The axes measure inches from the upper left corner.
WIDTH, HEIGHT, LANES_TOP, LANE = 10.0, 4.78, 0.82, 1.66
BATCH, SHARD, REPLICA, LOSSES, GRADIENTS, SUM, UPDATED = 0.96, 2.2, 3.3, 4.3, 5.3, 7.1, 9.2
TALL = 0.8  # the height of a shard and of a stack of parameter arrays
STAGES = (
    ((BATCH + SHARD) / 2, "split_and_load", GREY),
    (REPLICA, "lenet(X, params)", FORWARD_COLOUR),
    ((LOSSES + GRADIENTS) / 2, "autograd.backward", BACKWARD_COLOUR),
    ((GRADIENTS + SUM) / 2, "allreduce", GREY),
    ((SUM + UPDATED) / 2, "sgd", GREY),
)


class Words(NamedTuple):
    """The words of the picture in one language."""

    language: str
    stages: tuple[str, ...]
    device: str
    samples: str
    replica: str
    losses: str
    gradients: str
    sum: str
    updated: str
    legend: tuple[str, ...]
    title: str
    description: str


ENGLISH = Words(
    "en",
    ("split", "forward", "backward", "all-reduce", "update"),
    "device {}",
    "{} samples",
    "replica {}",
    "{} losses",
    "{} gradients",
    "sum of gradients",
    "replica {}, updated",
    ("on device 0 only", "on device 1 only", "the same on both", "forward", "backward", "copy"),
    "The data-parallel step on {devices} devices",
    "One lane per device, time to the right. A batch of {batch} samples is split into shards of "
    "{sizes}. Each device runs forward through its replica of the {arrays} parameter arrays, "
    "which gives one loss per sample, and backward, which gives {arrays} gradients. The "
    "all-reduce adds the gradients of all devices on device 0 and copies the sums to the others. "
    "Each device then updates its own replica: params -= lr / {batch} * sum.",
)
CHINESE = Words(
    "zh-CN",
    ("拆分", "前向传播", "反向传播", "全归约", "更新"),
    "设备 {}",
    "{} 个样本",
    "副本 {}",
    "{} 个损失",
    "{} 个梯度",
    "梯度之和",
    "更新后的副本 {}",
    ("仅在设备 0 上", "仅在设备 1 上", "两个设备上相同", "前向传播", "反向传播", "复制"),
    "{devices} 个设备上的数据并行训练：一步",
    "每个设备一行，时间从左到右。{batch} 个样本的小批量拆分成大小为 {sizes} 的分片。每个设备用"
    "自己的参数副本（{arrays} 个数组）做前向传播，每个样本得到一个损失；再做反向传播，得到 "
    "{arrays} 个梯度。全归约在设备 0 上对所有设备的梯度求和，再把和复制到其他设备。然后每个设备"
    "更新自己的副本：params -= lr / {batch} * sum。",
)


def draw(path: str | os.PathLike, words: Words = ENGLISH) -> None:
    """Draw one step of :func:`gluonpar.train_batch`: one lane per device, time to the right.

    The batch is split as :func:`gluonpar.split_and_load` splits it. Gradients are reduced as by the
    all-reduce 'star'. Text in Chinese stays text, which a browser shows in a font of its own:
    matplotlib's has no Chinese.
    """
    shards = partition.slices(BATCH_SIZE, NUM_DEVICES)
    with style("step"), warnings.catch_warnings():
        if words is not ENGLISH:
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            matplotlib.rcParams["svg.fonttype"] = "none"  # until style() ends
        figure, axes = sheet(WIDTH, HEIGHT)
        for (x, function, colour), name in zip(STAGES, words.stages):
            _text(axes, x, 0.3, name, size=13, weight="bold", color=colour)
            _text(axes, x, 0.56, function, family="DejaVu Sans Mono", color=colour)
        for device, shard in enumerate(shards):
            _split(axes, device, shard, words)
            _forward_and_backward(axes, device, shard.stop - shard.start, words)
            _update(axes, device, words)
        _text(axes, BATCH, _middle(0) + 1.8, words.samples.format(BATCH_SIZE))
        _allreduce(axes, words)
        _legend(axes, words)
        sizes = (" 和 " if words is CHINESE else " and ").join(
            str(shard.stop - shard.start) for shard in shards
        )
        values = {"batch": BATCH_SIZE, "arrays": len(LENET_SHAPES), "sizes": sizes}
        title = words.title.format(devices=NUM_DEVICES)
        save(figure, path, title, words.description.format(**values), language=words.language)


def _legend(axes: Axes, words: Words) -> None:
    """What each colour means: of boxes, then of arrows."""
    y, x = HEIGHT - 0.2, 1.62
    colours = (*COLOURS[:NUM_DEVICES], GREY, FORWARD_COLOUR, BACKWARD_COLOUR, GREY)
    for i, (colour, text) in enumerate(zip(colours, words.legend)):
        if i <= NUM_DEVICES:
            _box(axes, x + 0.1, y - 0.08, 0.2, 0.16, colour)
        else:
            x += 0.12
            arrow(axes, (x - 0.12, y), (x + 0.24, y), colour, dashed=i == len(colours) - 1, size=9)
        _text(axes, x + 0.3, y, text, ha="left")
        x += LEGEND_WIDTHS[i]


def _middle(device: int) -> float:
    return LANES_TOP + 0.14 + (LANE + 0.14) * device + TALL / 2 + 0.24


def _text(axes: Axes, x: float, y: float, text: str, **settings) -> None:
    defaults = {"color": GREY, "ha": "center", "va": "center", "size": 9.5}
    axes.text(x, y, text, **{**defaults, **settings})


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, **more) -> None:
    """A filled rectangle around ``x``, from ``y`` down."""
    axes.add_patch(Rectangle((x - width / 2, y), width, height, fc=colour, lw=0, **more))


def _stack(axes: Axes, x: float, device: int, colour: str, gid: str) -> None:
    """One box per parameter array, the taller the more elements it has."""
    sizes = [1 + math.log10(math.prod(shape)) for shape in LENET_SHAPES]
    gap, top = 0.02, _middle(device) - TALL / 2
    unit = (TALL - gap * (len(sizes) - 1)) / sum(sizes)
    for i, size in enumerate(sizes):
        _box(axes, x, top, 0.34, unit * size, colour, gid=f"{gid}-{device}-{i}")
        top += unit * size + gap


def _split(axes: Axes, device: int, shard: slice, words: Words) -> None:
    """The device's lane, and its part of the batch."""
    colour, middle = COLOURS[device], _middle(device)
    left, width = 1.62, WIDTH - 1.7
    _box(axes, left + width / 2, middle - 0.78, width, LANE, GREY, alpha=0.11)
    name = words.device.format(device)
    _text(axes, left + 0.12, middle - 0.6, name, color=colour, ha="left", weight="bold")
    height = 1.5 * (shard.stop - shard.start) / BATCH_SIZE
    top = _middle(0) + 0.15 + 1.5 * shard.start / BATCH_SIZE
    _box(axes, BATCH, top, 0.34, height - 0.03, colour, gid=f"batch-{device}")
    label = f"{shard.start}–{shard.stop - 1}"
    _text(axes, BATCH - 0.25, top + height / 2, label, ha="right", color=colour)
    arrow(axes, (BATCH + 0.22, top + height / 2), (SHARD - 0.2, middle), colour)


def _forward_and_backward(axes: Axes, device: int, num_samples: int, words: Words) -> None:
    colour, middle, below = COLOURS[device], _middle(device), _middle(device) + 0.56
    _box(axes, SHARD, middle - TALL / 2, 0.34, TALL, colour, gid=f"shard-{device}")
    _stack(axes, REPLICA, device, GREY, "params")
    _box(axes, LOSSES, middle - TALL / 2, 0.12, TALL, colour, gid=f"losses-{device}")
    _stack(axes, GRADIENTS, device, colour, "grads")
    for left, right, stage in (
        (SHARD, REPLICA, FORWARD_COLOUR),
        (REPLICA, LOSSES, FORWARD_COLOUR),
        (LOSSES, GRADIENTS, BACKWARD_COLOUR),
    ):
        arrow(axes, (left + 0.22, middle), (right - 0.2, middle), stage)
    _text(axes, SHARD, below, words.samples.format(num_samples))
    _text(axes, REPLICA, below, words.replica.format(device))
    _text(axes, LOSSES, below, words.losses.format(num_samples))
    _text(axes, GRADIENTS, below, words.gradients.format(len(LENET_SHAPES)))


def _allreduce(axes: Axes, words: Words) -> None:
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
        _stack(axes, SUM, device, GREY, "sum")
        _text(axes, SUM, _middle(device) + 0.56, words.sum)


def _update(axes: Axes, device: int, words: Words) -> None:
    x, middle = (SUM + UPDATED) / 2, _middle(device)
    arrow(axes, (SUM + 0.22, middle), (UPDATED - 0.2, middle), GREY)
    _text(axes, x, middle - 0.17, "params -=", family="DejaVu Sans Mono")
    _text(axes, x, middle + 0.17, f"lr / {BATCH_SIZE} * sum", family="DejaVu Sans Mono")
    _stack(axes, UPDATED, device, GREY, "updated")
    _text(axes, UPDATED, middle + 0.56, words.updated.format(device))
