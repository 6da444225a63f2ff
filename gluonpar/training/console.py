"""What a run tells its user: header, progress, a line an epoch, the last line, the plot."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Iterable, Iterator, Sequence, TextIO

import mxnet as mx
import numpy as np

from gluonpar.checkpoint import files

if TYPE_CHECKING:
    from gluonpar.training.profiler.profile import Profiler


@dataclass(frozen=True)
class Epoch:
    """One epoch's figures. ``seconds`` is its training time, without the evaluation after it."""

    epoch: int
    seconds: float
    loss: float
    test_accuracy: float
    images_per_second: float


@dataclass
class History:
    """A run: its contexts and model, its epochs, the trained parameters on the first context."""

    ctx: Sequence[mx.Context]
    epochs: list[Epoch] = field(default_factory=list)
    params: list[mx.nd.NDArray] = field(default_factory=list)
    model: str = "lenet"


class Console:
    """Lines on ``out``; a progress bar on ``err`` while an epoch runs, if that is a terminal."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out, self.err = out or sys.stdout, err or sys.stderr
        self._bar = None

    def line(self, text: str) -> None:
        """Print one line, at once, clear of the progress bar."""
        hidden = (
            self._bar.external_write_mode(file=self.out) if self._bar else contextlib.nullcontext()
        )
        with hidden:
            print(_shown(text, self.out), file=self.out, flush=True)

    def notice(self, text: str) -> None:
        """Print one line on ``err``: what was chosen on the user's behalf, and why."""
        print(_shown(text, self.err), file=self.err, flush=True)

    def header(self, version: str, rows: dict[str, str]) -> None:
        """Print versions, then a line for each of ``rows``."""
        self.line(
            f"gluonpar {version}, mxnet {mx.__version__}, numpy {np.__version__}, "
            f"python {platform.python_version()}"
        )
        for name, value in rows.items():
            self.line(f"{name}: {value}")

    def batches(self, batches: Iterable, total: int, epoch: int, done: int = 0) -> Iterator:
        """Yield ``batches``, showing the progress through ``total``; ``done`` are done before."""
        from tqdm import (
            tqdm,  # here, because importing gluonpar must cost no more than importing MXNet
        )

        terminal = self.err.isatty()
        with tqdm(
            batches,
            f"epoch {epoch}",
            total,
            leave=False,
            file=self.err,
            disable=not terminal,
            initial=done,
            unit="batch",
        ) as self._bar:
            yield from self._bar
        self._bar = None

    def progress(self, loss: float) -> None:
        """Show the mean loss so far in the progress bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}")

    def epoch(self, figures: Epoch) -> None:
        """Print one epoch's line in the book's words."""
        self.line(
            f"epoch {figures.epoch}, time {figures.seconds:.1f} sec, loss {figures.loss:.3f}, "
            f"test acc {figures.test_accuracy:.2f}, {figures.images_per_second:.0f} images/sec"
        )

    def result(self, history: History) -> None:
        """Print the last line: accuracy reached, mean time of an epoch, devices."""
        seconds = sum(epoch.seconds for epoch in history.epochs) / len(history.epochs)
        self.line(
            f"test acc: {history.epochs[-1].test_accuracy:.2f}, {seconds:.1f} sec/epoch "
            f"on {list(history.ctx)}"
        )

    def trace(self, path: str, profiled: Profiler) -> None:
        """Print which steps are in the trace file ``path``."""
        self.line(f"trace: {path}, {_steps(profiled)}")

    def profile(self, profiled: Profiler) -> None:
        """Print where a step's time went, and why K devices are not K times as fast as one."""
        ms = 1e3 * profiled.timeline.step_seconds
        self.line(f"profile: {_steps(profiled)}, {ms:.1f} ms a step")
        self.line(profiled.table())
        self.line(profiled.sentence())


def _shown(text: str, stream: TextIO) -> str:
    """What ``stream`` cannot show, such as the bytes of a file's name that are no text, as code."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _steps(profiled: Profiler) -> str:
    first, last = profiled.steps
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{which} of epoch 1"


def check_trace(path: str) -> None:
    """Raise ValueError, before anything is trained, if no trace could be written to ``path``."""
    if not path or os.path.isdir(path):
        shown = path or repr(path)
        raise ValueError(f"cannot write a trace to {shown}: it is a folder; give a file in it")
    try:
        files.check_replaceable(path)
    except OSError as error:
        raise ValueError(
            f"cannot write a trace to {path}: {error.strerror}; "
            "give a file in a folder that exists and can be written"
        ) from error


def check_plot(path: str) -> None:
    """Raise ValueError, before anything is trained, if no plot could be written to ``path``."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ValueError(
            f"a plot needs matplotlib ({error}): pip install 'gluonpar[plot]'"
        ) from error
    file = pathlib.Path(path)
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix[1:].lower() not in kinds:
        raise ValueError(
            f"cannot plot to {path}: its ending must be one of {', '.join(sorted(kinds))}"
        )
    if not os.path.isdir(file.parent) or os.path.isdir(path):
        raise ValueError(f"cannot plot to {path}: it must be a file in a folder that exists")
    try:
        files.check_writable(path)
    except OSError as error:
        raise ValueError(f"cannot plot to {path}: {error.strerror}; give another file") from error


def plot(history: History, path: str) -> None:
    """Draw loss, test accuracy and images/s over epochs into the picture file ``path``."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 3), layout="constrained")
    epochs = [epoch.epoch for epoch in history.epochs]
    columns = (
        ("training loss", "loss"),
        ("test accuracy", "test_accuracy"),
        ("images/s", "images_per_second"),
    )
    for axes, (title, name) in zip(figure.subplots(1, len(columns)), columns):
        axes.plot(epochs, [getattr(epoch, name) for epoch in history.epochs], marker="o")
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    figure.axes[-1].set_ylim(bottom=0)
    figure.suptitle(f"{history.model} on {list(history.ctx)}")
    figure.savefig(path, dpi=120)
