"""The results of a run and of its epochs, the files that have them, and a run's progress."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import pathlib
from dataclasses import asdict, dataclass, field
from typing import Any, Sequence

import mxnet as mx

from gluonpar.checkpoint import files

SUFFIXES = (".csv", ".json")


@dataclass(frozen=True)
class Epoch:
    """Results of one epoch. ``seconds`` is its training time, without the evaluation after it.

    ``lr`` is the learning rate of its last update. ``validation_accuracy`` is None unless the run
    holds images out for early stopping.
    """

    epoch: int
    seconds: float
    loss: float
    test_accuracy: float
    images_per_second: float
    lr: float | None = None
    validation_accuracy: float | None = None

    def figures(self) -> dict[str, float]:
        """Return the results by name, without those that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(repr=False, eq=False)
class History:
    """Results of a run; ``params`` are the trained parameters on the first context of ``ctx``.

    Two histories are equal only if they are the same object.
    """

    ctx: Sequence[mx.Context]
    epochs: list[Epoch] = field(default_factory=list)
    params: list[mx.nd.NDArray] = field(default_factory=list)
    model: str = "lenet"

    def __repr__(self) -> str:
        number = f"{len(self.epochs)} epoch{'s' * (len(self.epochs) != 1)}"
        reached = f", test accuracy {self.epochs[-1].test_accuracy:.4f}" if self.epochs else ""
        return f"<History of {self.model}: {number} on {list(self.ctx)}{reached}>"

    def save(self, path: str) -> None:
        """Write the epochs to ``path``, whole or not at all: as .csv, or .json, a list of objects.

        The columns are the fields of :class:`Epoch`, without those that are None. Raises OSError if
        the file system refuses, and ValueError for another suffix.
        """
        _check_suffix(path, "a history", SUFFIXES)
        rows, content = [epoch.figures() for epoch in self.epochs], io.StringIO()
        if pathlib.Path(path).suffix.lower() == ".json":
            json.dump(rows, content, indent=1)
            content.write("\n")
        else:
            names = dict.fromkeys(name for row in rows for name in row)
            table = csv.DictWriter(content, [*names], lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        with files.atomic_write(path) as file:
            file.write(content.getvalue().encode())

    def plot(self, path: str | None = None) -> Any:
        """Plot loss, test accuracy and images/s over epochs; return matplotlib's figure.

        With ``path`` it is written to that image file, too. A notebook shows the figure if it is
        the value of a cell.
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
        figure.axes[-1].set_ylim(bottom=0)
        figure.suptitle(f"{self.model} on {list(self.ctx)}")
        if path is not None:
            with files.atomic_write(path) as file:
                figure.savefig(file, dpi=120, format=pathlib.Path(path).suffix[1:].lower())
        return figure


def summary_writer() -> type:
    """Return the class SummaryWriter of tensorboardX or, without it, of PyTorch.

    Raises ValueError, with the remedy, if neither is installed.
    """
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        try:
            return importlib.import_module(module).SummaryWriter
        except ImportError:
            continue
    raise ValueError("tensorboard needs tensorboardX: pip install tensorboardX")


def write_tensorboard(folder: str | os.PathLike, results: Epoch) -> None:
    """Write an epoch's results into ``folder``: a file per epoch, complete when this returns.

    A writer that stays open writes on a thread of its own, so a killed run would lose its last
    epochs. TensorBoard shows the files as one run. It leaves out what an earlier run wrote about
    the same and later epochs.
    """
    suffix = f".epoch-{results.epoch:04d}"
    writer = summary_writer()(str(folder), purge_step=results.epoch, filename_suffix=suffix)
    try:
        for name, value in results.figures().items():
            if name not in ("epoch", "seconds"):
                writer.add_scalar(name, value, results.epoch)
    finally:
        writer.close()


def check_file(path: str, content: str, suffixes: Sequence[str]) -> None:
    """Raise ValueError unless ``content``, such as a plot, can be written to ``path``."""
    _check_suffix(path, content, suffixes)
    try:
        files.check_replaceable(path)
    except (OSError, ValueError) as error:
        reason = f"{getattr(error, 'strerror', error)}; give a file in an existing folder"
        raise ValueError(f"cannot write {content} to {path}: {reason}") from error


def check_plot(path: str) -> None:
    """Raise ValueError if :meth:`History.plot` could not write to ``path``."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ValueError(f"plot needs matplotlib: {error}; pip install matplotlib") from error
    suffixes = [f".{kind}" for kind in FigureCanvasAgg.get_supported_filetypes()]
    check_file(path, "a plot", suffixes)


def _check_suffix(path: str, content: str, suffixes: Sequence[str]) -> None:
    if pathlib.Path(path).suffix.lower() not in suffixes:
        expected = f"its suffix must be one of {', '.join(suffixes)}"
        raise ValueError(f"cannot write {content} to {path}: {expected}")


@dataclass
class Progress:
    """How far a run has come, as a checkpoint stores it.

    ``batch`` batches of epoch ``epoch`` (from 1) have taken ``seconds`` of training time, and the
    sum of their samples' losses is ``loss_sum``. ``history`` has the epochs before this one.
    ``lr`` is the learning rate of the next step.
    """

    epoch: int = 1
    batch: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    history: list[Epoch] = field(default_factory=list)
    lr: float = 0.0
