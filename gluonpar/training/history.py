"""The results of a run and of its epochs, and a plot of them."""

from __future__ import annotations

import csv
import io
import json
import pathlib
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Sequence

import mxnet as mx

from gluonpar.checkpoint import files


@dataclass(frozen=True)
class Epoch:
    """Results of one epoch. ``seconds`` is its training time, without the evaluation after it.

    ``lr`` is the learning rate. ``validation_accuracy`` is None unless the run holds images out for
    early stopping.
    """

    epoch: int
    seconds: float
    loss: float
    test_accuracy: float
    images_per_second: float
    lr: float | None = None
    validation_accuracy: float | None = None


@dataclass(eq=False)
class History:
    """Results of a run; ``params`` are the trained parameters on the first context of ``ctx``."""

    ctx: Sequence[mx.Context]
    epochs: list[Epoch] = field(default_factory=list)
    params: list[mx.nd.NDArray] = field(default_factory=list, repr=False)
    model: str = "lenet"

    def write(self, path: str) -> None:
        """Write a row per epoch, with the fields of :class:`Epoch`: JSON lines, or CSV.

        JSON lines if the path ends in ".jsonl". The whole file is written, or nothing.
        """
        rows, text = [asdict(epoch) for epoch in self.epochs], io.StringIO()
        if path.endswith(".jsonl"):
            text.writelines(f"{json.dumps(row)}\n" for row in rows)
        else:
            table = csv.DictWriter(text, [each.name for each in fields(Epoch)], lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        with files.atomic_write(path) as file:
            file.write(text.getvalue().encode())

    def plot(self, path: str | None = None) -> Any:
        """Plot loss, accuracy and images/s over epochs; return matplotlib's figure.

        With early stopping the accuracy on the images held out is drawn beside that on the test
        images. With ``path`` the figure is written to that image file, too. A notebook shows it if
        it is the value of a cell.
        """
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        class Shown(Figure):
            def _repr_png_(self) -> bytes:  # called by notebooks
                content = io.BytesIO()
                self.savefig(content, format="png")
                return content.getvalue()

        figure = Shown(figsize=(10, 3), layout="constrained")
        epochs = [epoch.epoch for epoch in self.epochs]
        figures = [(e.loss, e.test_accuracy, e.images_per_second) for e in self.epochs]
        titles = ("training loss", "test accuracy", "images/s")
        for axes, title, values in zip(figure.subplots(1, len(titles)), titles, zip(*figures)):
            axes.plot(epochs, values, marker="o")
            axes.set(title=title, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
        pairs = [(e.epoch, e.validation_accuracy) for e in self.epochs]
        held_out = [(epoch, value) for epoch, value in pairs if value is not None]
        if held_out:
            axes = figure.axes[1]
            axes.lines[0].set_label("test")
            axes.plot(*zip(*held_out), marker="o", label="validation")
            axes.set_title("accuracy")
            axes.legend()
        figure.axes[-1].set_ylim(0, 1.05 * max(epoch.images_per_second for epoch in self.epochs))
        figure.suptitle(f"{self.model} on {list(self.ctx)}")
        if path is not None:
            with files.atomic_write(path) as file:
                figure.savefig(file, dpi=120, format=pathlib.Path(path).suffix[1:].lower())
        return figure


def check_file(option: str, path: str) -> None:
    """Raise ValueError unless the file of this option could be written to ``path``."""
    try:
        files.check_replaceable(path)
    except OSError as error:
        raise ValueError(f"{option}={path!r} cannot be written: {error.strerror}") from error


def check_plot(path: str) -> None:
    """Raise ValueError if :meth:`History.plot` could not write to ``path``."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ValueError(f"plot needs matplotlib: {error}; pip install matplotlib") from error
    check_file("plot", path)
    suffixes = [f".{kind}" for kind in FigureCanvasAgg.get_supported_filetypes()]
    if pathlib.Path(path).suffix.lower() not in suffixes:
        raise ValueError(f"cannot write a plot to {path}, only to {', '.join(suffixes)}")
