"""Records of a run: one epoch's results, the whole run's and their plot, and the progress."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass, field
from typing import Sequence

import mxnet as mx

from gluonpar.checkpoint import files


@dataclass(frozen=True)
class Epoch:
    """Results of one epoch. ``seconds`` is its training time, without the evaluation after it."""

    epoch: int
    seconds: float
    loss: float
    test_accuracy: float
    images_per_second: float


@dataclass
class History:
    """Results of a run. ``params`` are the trained parameters on the first context of ``ctx``."""

    ctx: Sequence[mx.Context]
    epochs: list[Epoch] = field(default_factory=list)
    params: list[mx.nd.NDArray] = field(default_factory=list)
    model: str = "lenet"

    def plot(self, path: str) -> None:
        """Plot loss, test accuracy and images/s over epochs to the image file ``path``."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(10, 3), layout="constrained")
        epochs = [epoch.epoch for epoch in self.epochs]
        figures = [(e.loss, e.test_accuracy, e.images_per_second) for e in self.epochs]
        titles = ("training loss", "test accuracy", "images/s")
        for axes, title, values in zip(figure.subplots(1, len(titles)), titles, zip(*figures)):
            axes.plot(epochs, values, marker="o")
            axes.set(title=title, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
        figure.axes[-1].set_ylim(bottom=0)
        figure.suptitle(f"{self.model} on {list(self.ctx)}")
        figure.savefig(path, dpi=120)


def check_plot(path: str) -> None:
    """Raise ValueError if :meth:`History.plot` could not write to ``path``."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ValueError(f"plot needs matplotlib: {error}; pip install 'gluonpar[plot]'") from error
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if pathlib.Path(path).suffix[1:].lower() not in kinds:
        raise ValueError(f"cannot plot to {path}: its suffix must be one of {', '.join(kinds)}")
    try:
        files.check_writable(path)
    except OSError as error:
        raise ValueError(f"cannot plot to {path}: {error.strerror}; give another file") from error


@dataclass
class Progress:
    """How far a run has come, as a checkpoint stores it.

    ``batch`` batches of epoch ``epoch`` (from 1) are done, in ``seconds`` of training time;
    ``loss_sum`` is the sum of their samples' losses. ``history`` has the epochs before.
    """

    epoch: int = 1
    batch: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    history: list[Epoch] = field(default_factory=list)
