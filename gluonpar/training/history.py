"""The results of a run and of its epochs: a file, a plot, and the lines that a run prints."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pathlib
import platform
import sys
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Iterable, Iterator, Sequence, TextIO

import mxnet as mx
import numpy as np

from gluonpar import cluster
from gluonpar.checkpoint import files
from gluonpar.install import __version__


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
        """Write a row per epoch, with the fields of :class:`Epoch`, all of them or nothing.

        The rows are JSON lines if the path ends in ".jsonl", else CSV.
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

        With early stopping there is also the accuracy on the images held out. The figure is also
        written to the image file ``path``, if given. A notebook shows it as the value of a cell.
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


class Console:
    """Prints lines on ``out``, and notices and, on a terminal, a progress bar on ``err``."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out = out or sys.stdout or io.StringIO()  # sys.stdout is None if it is closed
        self.err = err or sys.stderr or io.StringIO()
        self.failure = ""  # why ``out`` could not be written, if so
        self._bar: Any = None

    def line(self, text: str) -> None:
        """Print one line on ``out`` and flush it; hide the progress bar meanwhile.

        Raises BrokenPipeError if ``out`` has no reader any more. After another error, such as a
        full disk, ``failure`` says what it was, and nothing more is printed on ``out``.
        """
        bar = self._bar
        with bar.external_write_mode(file=self.out) if bar else contextlib.nullcontext():
            self.failure = _print(text, self.out) or self.failure

    def notice(self, text: str) -> None:
        """Print one line on ``err``, as :meth:`line` does on ``out``."""
        _print(text, self.err)

    def header(self, rows: dict[str, str]) -> None:
        """Print the versions, then a line for each of ``rows`` that has a value."""
        packages = f"mxnet {mx.__version__}, numpy {np.__version__}"
        self.line(f"gluonpar {__version__}, {packages}, python {platform.python_version()}")
        for name, value in rows.items():
            if value:
                self.line(f"{name}: {value}")

    def batches(
        self, batches: Iterable, total: int, batch_size: int, epoch: int, done: int = 0
    ) -> Iterator:
        """Yield ``batches``, with a progress bar; ``done`` of ``total`` batches precede them."""
        from tqdm import tqdm  # here, because `import gluonpar` must cost no more than MXNet

        options = {"leave": False, "unit": " images", "unit_scale": batch_size, "initial": done}
        shows = self.err.isatty() and os.environ.get("TERM") != "dumb"
        bar = tqdm(batches, f"epoch {epoch}", total, file=self.err, disable=not shows, **options)
        with bar as self._bar:
            yield from self._bar
        self._bar = None

    def progress(self, loss: float) -> None:
        """Show the mean loss so far in the progress bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}")

    def epoch(self, results: Epoch) -> None:
        """Print the results of one epoch."""
        validation, speed = results.validation_accuracy, results.images_per_second
        held_out = "" if validation is None else f"validation acc {validation:.2f}, "
        self.line(
            f"epoch {results.epoch}, time {results.seconds:.1f} sec, loss {results.loss:.3f}, "
            f"{held_out}test acc {results.test_accuracy:.2f}, {speed:.0f} images/sec"
        )

    def result(self, history: History) -> None:
        """Print the final accuracy, the mean time of an epoch, and the devices of all processes."""
        seconds = sum(epoch.seconds for epoch in history.epochs) / len(history.epochs)
        used, accuracy = str(list(history.ctx)), history.epochs[-1].test_accuracy
        if cluster.size() > 1:
            used = f"{cluster.size() * len(history.ctx)} devices in {cluster.size()} processes"
        self.line(f"test acc: {accuracy:.2f}, {seconds:.1f} sec/epoch on {used}")


def _print(text: str, stream: TextIO) -> str:
    """Print a line; return why that failed, or ""."""
    try:
        print(text, file=stream, flush=True)
        return ""
    except OSError as error:
        # Buffered text, and all that is printed on the stream later, goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        return error.strerror or str(error)
