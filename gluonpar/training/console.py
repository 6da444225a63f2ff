"""The lines that a run prints, and its progress bar."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import sys
from typing import Any, Iterable, Iterator, TextIO

import mxnet as mx
import numpy as np

from gluonpar import cluster
from gluonpar.install import __version__
from gluonpar.training.history import Epoch, History


class Console:
    """Output of a run: lines on ``out``, notices and, on a terminal, a progress bar on ``err``."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out = out or sys.stdout or io.StringIO()  # sys.stdout is None if it is closed
        self.err = err or sys.stderr or io.StringIO()
        self.failure = ""  # why ``out`` could not be written, if so
        self._bar: Any = None

    def line(self, text: str) -> None:
        """Print one line on ``out`` and flush it; hide the progress bar meanwhile.

        Raises BrokenPipeError if nobody reads ``out`` any more. After another error, such as a full
        disk, ``failure`` says what it was, and nothing more is printed on ``out``.
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
        """Print one epoch's results."""
        validation, speed = results.validation_accuracy, results.images_per_second
        held_out = "" if validation is None else f"validation acc {validation:.2f}, "
        self.line(
            f"epoch {results.epoch}, time {results.seconds:.1f} sec, loss {results.loss:.3f}, "
            f"{held_out}test acc {results.test_accuracy:.2f}, {speed:.0f} images/sec"
        )

    def result(self, history: History) -> None:
        """Print the final accuracy, the mean time of an epoch, and the devices of all processes."""
        seconds = sum(epoch.seconds for epoch in history.epochs) / len(history.epochs)
        accuracy = f"{history.epochs[-1].test_accuracy:.2f}"
        used, processes = str(list(history.ctx)), cluster.size()
        if processes > 1:
            used = f"{processes * len(history.ctx)} devices in {processes} processes"
        self.line(f"test acc: {accuracy}, {seconds:.1f} sec/epoch on {used}")


def _print(text: str, stream: TextIO) -> str:
    """Print a line; return why that failed, or ""."""
    try:
        print(text, file=stream, flush=True)
        return ""
    except OSError as error:
        # Buffered text, and all that is printed on the stream later, goes nowhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            raise
        return error.strerror or str(error)
