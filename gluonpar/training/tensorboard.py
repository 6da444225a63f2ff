"""Results of a run as files of TensorBoard."""

from __future__ import annotations

import importlib
import os
from typing import Any

from gluonpar.training.history import Epoch


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


def write(folder: str | os.PathLike, results: Epoch) -> None:
    """Write an epoch's results into ``folder``: a file per epoch, complete when this returns.

    A writer that stays open would lose the last epochs of a killed run, because it writes on a
    thread of its own. TensorBoard shows the files as one run, without the results of the same and
    later epochs that an earlier run left: they are purged.
    """
    options: dict[str, Any] = {"filename_suffix": f".epoch-{results.epoch:04d}"}
    writer = summary_writer()(str(folder), purge_step=results.epoch, **options)
    try:
        for name, value in results.figures().items():
            writer.add_scalar(name, value, results.epoch)
    finally:
        writer.close()
