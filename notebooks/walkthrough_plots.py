"""The look of the walkthrough's plots, and the plots that take more lines than they explain."""

from __future__ import annotations

import functools
from typing import Callable, Mapping, Sequence

import numpy as np
from d2l import mxnet as d2l
from mxnet import Context

from drawing import COLOURS, SETTINGS
from drawing import draw as plan  # noqa: F401 - a picture of an all-reduce's hops

WIDE = (5.2, 2.6)  # inches: on a phone's screen the text is still readable


def use_style() -> None:
    """Plot on a transparent background in colours that are readable on white and on black."""
    d2l.use_svg_display()
    d2l.plt.rcParams.update(SETTINGS)
    cycle = d2l.plt.cycler(color=COLOURS)
    d2l.plt.rcParams.update({"axes.prop_cycle": cycle, "legend.frameon": False})
    d2l.plt.rcParams.update({"font.size": 9, "figure.dpi": 100})


def loss_curves(counts: Sequence[int], num_epochs: int) -> dict[int, Callable[[int, float], None]]:
    """Return a function per number of devices that adds an epoch and its loss to one plot."""
    animator = d2l.Animator(
        xlabel="epoch",
        ylabel="training loss",
        legend=[f"{count} device{'s' * (count > 1)}" for count in counts],
        xlim=[1, num_epochs],
        fmts=("C0-", "C1--", "C3:"),
        figsize=WIDE,
    )

    def draw(i: int, epoch: int, loss: float) -> None:
        animator.add(epoch, [loss if j == i else None for j in range(len(counts))])

    return {count: functools.partial(draw, i) for i, count in enumerate(counts)}


def gradients(
    ctx: Sequence[Context], parts: Sequence[np.ndarray], total: np.ndarray, whole: np.ndarray
) -> None:
    """Plot each device's part of a gradient, their sum, and the gradient of the whole batch."""
    figure, axes = d2l.plt.subplots(figsize=WIDE)
    classes = np.arange(len(total))
    for i, (bars, label) in enumerate(zip((*parts, total), (*ctx, "their sum"))):
        axes.bar(classes + 0.25 * (i - 1), bars, 0.25, label=label)
    axes.plot(classes + 0.25, whole, "_", color=SETTINGS["text.color"], ms=12, label="one device")
    axes.set(xlabel="class", ylabel="gradient of b4", xticks=classes)
    _legend_above(axes, figure)


def links_and_memory(
    on_links: Mapping[str, Sequence[float]],
    in_memory: Mapping[str, Sequence[float]],
    sizes: Sequence[int],
) -> None:
    """Plot how many times as fast as the star each algorithm is, by size (bytes), in two panels.

    ``on_links`` and ``in_memory`` are the times that a model predicts and that were measured.
    """
    figure, panels = d2l.plt.subplots(1, 2, figsize=(WIDE[0], 2.8), sharey=True)
    titles = ("with links of 10 GB/s (model)", "CPU contexts (measured)")
    for axes, title, times in zip(panels, titles, (on_links, in_memory)):
        others = [name for name in times if name != "star"]
        for i, name in enumerate(others):
            ratios = np.array(times["star"]) / np.array(times[name])
            place = np.arange(len(sizes)) + 0.25 * (i - (len(others) - 1) / 2)
            bars = {"bottom": 1, "color": COLOURS[i + 1], "label": name, "zorder": 2}
            axes.bar(place, ratios - 1, 0.25, **bars)
        axes.axhline(1, color=SETTINGS["text.color"], lw=0.8, zorder=3)
        axes.set(title=title, xlabel="size of the array", yscale="log")
        axes.title.set_fontsize(9)
        axes.set_xticks(range(len(sizes)), map(_bytes, sizes))
        axes.set_yticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4], ["1/8", "1/4", "1/2", "1", "2", "4"])
        axes.minorticks_off()
    panels[0].set_ylabel("times as fast as the star")
    handles = panels[1].get_legend_handles_labels()
    figure.legend(*handles, ncol=3, loc="upper center", bbox_to_anchor=(0.5, 1.06))
    figure.tight_layout()


def _bytes(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def _legend_above(axes, figure) -> None:
    axes.legend(ncol=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
