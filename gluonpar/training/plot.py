"""The plot of a run's history."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from gluonpar.checkpoint import files

if TYPE_CHECKING:
    from gluonpar.training.history import History


def check(path: str) -> None:
    """Raise ValueError if no plot could be written to ``path``."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        remedy = "pip install 'gluonpar[plot]'"
        raise ValueError(f"a plot needs matplotlib ({error}): {remedy}") from error
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if pathlib.Path(path).suffix[1:].lower() not in kinds:
        raise ValueError(f"cannot plot to {path}: its suffix must be one of {', '.join(kinds)}")
    try:
        files.check_writable(path)
    except OSError as error:
        raise ValueError(f"cannot plot to {path}: {error.strerror}; give another file") from error


def draw(history: History, path: str) -> None:
    """Plot loss, test accuracy and images/s over epochs to the image file ``path``."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 3), layout="constrained")
    epochs = [epoch.epoch for epoch in history.epochs]
    figures = [(e.loss, e.test_accuracy, e.images_per_second) for e in history.epochs]
    titles = ("training loss", "test accuracy", "images/s")
    for axes, title, values in zip(figure.subplots(1, len(titles)), titles, zip(*figures)):
        axes.plot(epochs, values, marker="o")
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    figure.axes[-1].set_ylim(bottom=0)
    figure.suptitle(f"{history.model} on {list(history.ctx)}")
    figure.savefig(path, dpi=120)
