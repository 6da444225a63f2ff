"""The options of a run: their values, and what ``--help`` says about them."""

from __future__ import annotations

import dataclasses
import numbers
import os
from typing import Any, Callable, Iterable

import numpy as np

from gluonpar.checkpoint import onnx_export
from gluonpar.collectives import ALGORITHMS
from gluonpar.optim import check_lr
from gluonpar.runtime import devices
from gluonpar.training.data.dataset import NAMES as DATASETS
from gluonpar.training.workloads import WORKLOADS

# By the type of an option: what its value may be, the words for that, and what converts its text,
# or each of its parts between commas.
TYPES: dict[str, tuple[Any, str, Callable]] = {
    "int": (numbers.Integral, "an integer", int),
    "float": (numbers.Real, "a number", float),
    "bool": (bool, "True or False", bool),
    "str": ((str, os.PathLike), "a string", str),
    "tuple[int, ...]": ((tuple, list, range, np.ndarray), "a list of integers", int),
    "tuple[float, ...]": ((tuple, list, range, np.ndarray), "a list of numbers", float),
}


def _option(
    default: Any, text: str, metavar: str | None = None, choices: Iterable[str] | None = None
) -> Any:
    """Return a field and what ``--help`` says about it; a value called "N" is at least 1."""
    metadata = {"help": text, "metavar": metavar, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The options of a run; ``gluonpar train --help`` says what each of them means.

    Raises TypeError for a value of another type, ValueError for one that is not allowed, and
    ImportError for ``onnx`` without the package. :class:`Run` checks values that depend on the
    machine or the data.
    """

    num_gpus: int | None = _option(None, "train on K GPUs, or K CPU devices without GPUs", "K")
    batch_size: int = _option(256, "samples per step, on all devices (%(default)s)", "N")
    lr: float | None = _option(None, "learning rate (0.2, resnet18 0.1)")
    num_epochs: int = _option(4, "passes over the training images (%(default)s)", "N")
    gpus: tuple[int, ...] | None = _option(None, "use the GPUs with these ids, such as 0,2", "IDS")
    device: str = _option(
        "auto", "gpu: GPUs or an error; cpu: CPUs; auto: as --num-gpus", choices=devices.KINDS
    )
    seed: int = _option(0, "of the initial parameters and the shuffling (%(default)s)")
    dataset: str = _option("fashion-mnist", "synthetic needs no files", choices=DATASETS)
    data_dir: str | None = _option(None, "folder with the four files of Fashion-MNIST", "DIR")
    limit: int | None = _option(None, "use the first N training and test images only", "N")
    algorithm: str | None = _option(None, f"the all-reduce: {', '.join(ALGORITHMS)}", "NAME")
    log_interval: int | None = _option(None, "print the loss every N batches", "N")
    save_dir: str | None = _option(None, "save each epoch's parameters, and checkpoints", "DIR")
    plot: str | None = _option(None, "plot loss, test accuracy and images/s", "FILE.png")
    profile: bool = _option(False, "print where a step's time goes, in the first epoch")
    dry_run: bool = _option(False, "check everything and take one step; save nothing")
    model: str = _option("lenet", "what to train (%(default)s)", choices=WORKLOADS)
    weights: tuple[float, ...] | None = _option(None, "relative speeds of the devices", "W,W")
    save_every: int | None = _option(None, "also save a checkpoint every N batches", "N")
    keep: int = _option(3, "keep the last N checkpoints (%(default)s)", "N")
    resume: str | None = _option(
        None, "continue from this checkpoint, or the newest in this folder or --save-dir", "PATH"
    )
    onnx: bool = _option(False, "save each epoch's network in --save-dir as ONNX, too")
    deterministic: bool = _option(False, "repeat a seed's run bit for bit on GPUs, too; slower")
    early_stop: int | None = _option(
        None, "hold out a tenth of the images; stop after N epochs without a higher accuracy", "N"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check(field)
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be between 0 and {2**31 - 1}, got {self.seed}")
        lr = WORKLOADS[self.model].default_lr if self.lr is None else self.lr
        check_lr(lr)
        object.__setattr__(self, "lr", lr)
        if self.save_dir is None:
            for name in ("save_every", "keep", "onnx"):
                if getattr(self, name) != getattr(Configuration, name):
                    raise ValueError(f"{name} needs a folder for files: give save_dir too")
            if self.resume == "":
                raise ValueError("resume without a value needs save_dir: give one, or a checkpoint")
        if self.onnx:
            onnx_export.check_onnx()

    def _check(self, field: dataclasses.Field) -> None:
        """Check a field by its type and its option; make a string of a path, a tuple of a list."""
        name, value = field.name, getattr(self, field.name)
        kind, *optional = str(field.type).split(" | ")
        if value is None and optional:
            return
        types, words, _ = TYPES[kind]
        if not isinstance(value, types) or isinstance(value, bool) != (kind == "bool"):
            raise TypeError(f"{name} must be {words}, got {value!r}")
        if field.metadata["metavar"] == "N" and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
        if value == "" and name != "resume":
            raise ValueError(f"{name} must not be empty, got ''")
        choices = field.metadata["choices"]
        if choices is not None and value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if kind == "str" or kind.startswith("tuple"):
            plain = os.fspath(value) if kind == "str" else tuple(value)
            object.__setattr__(self, name, plain)
