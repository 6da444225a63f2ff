"""The options of a run, the values they may have, and the optimizer that they describe."""

from __future__ import annotations

import math
import numbers
import os
from dataclasses import dataclass, fields
from typing import Any, Callable

import mxnet as mx
import numpy as np

from gluonpar.checkpoint import onnx_export
from gluonpar.optim import check_lr
from gluonpar.training.workloads import WORKLOADS

SCHEDULES = ("constant", "step", "cosine")

# By the type of a field: what its value may be, and the words for that.
_TYPES: dict[str, tuple[Any, str]] = {
    "int": (numbers.Integral, "an integer"),
    "float": (numbers.Real, "a number"),
    "bool": (bool, "True or False"),
    "str": ((str, os.PathLike), "a string"),
    "tuple[int, ...]": ((tuple, list, range, np.ndarray), "a list of integers"),
    "tuple[float, ...]": ((tuple, list, range, np.ndarray), "a list of numbers"),
}

# Registered, but no use here: MXNet's Adamax divides 0 by 0 where a gradient has always been 0,
# GroupAdaGrad takes matrices only, and "test" is of MXNet's own tests.
_EXCLUDED = ("adamax", "groupadagrad", "test")


def optimizer_names() -> list[str]:
    """Return the names of MXNet's registered optimizers that can train these models."""
    return sorted({*mx.optimizer.Optimizer.opt_registry} - {*_EXCLUDED})


def default_momentum(optimizer: str) -> float | None:
    """Return the momentum that an optimizer of MXNet has by default; None: it takes none."""
    return getattr(mx.optimizer.create(optimizer), "momentum", None)


@dataclass(frozen=True)
class Configuration:
    """The options of a run; ``gluonpar train --help`` says what each of them means.

    Raises TypeError for a value of another type, and ValueError for one that is not allowed.
    :class:`Run` checks values that depend on the machine or the data.
    """

    num_gpus: int | None = None
    batch_size: int = 256
    lr: float | None = None
    num_epochs: int = 4
    gpus: tuple[int, ...] | None = None
    device: str = "auto"
    seed: int = 0
    dataset: str = "fashion-mnist"
    data_dir: str | None = None
    limit: int | None = None
    algorithm: str | None = None
    log_interval: int | None = None
    save_dir: str | None = None
    plot: str | None = None
    profile: bool = False
    dry_run: bool = False
    model: str = "lenet"
    weights: tuple[float, ...] | None = None
    save_every: int | None = None
    keep: int = 3
    resume: str | None = None
    onnx: bool = False
    deterministic: bool = False
    check_finite: bool = True
    optimizer: str = "sgd"
    momentum: float | None = None
    wd: float = 0.0
    lr_schedule: str = "constant"
    lr_steps: tuple[int, ...] | None = None
    lr_factor: float = 0.1
    warmup_epochs: float = 0.0
    early_stop: int | None = None
    history: str | None = None
    tensorboard: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        counts = ("batch_size", "num_epochs", "limit", "log_interval", "save_every", "keep")
        for name in (*counts, "early_stop"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be between 0 and {2**31 - 1}, got {self.seed}")
        names = {"model": WORKLOADS, "optimizer": optimizer_names(), "lr_schedule": SCHEDULES}
        for name, known in names.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        lr = self.lr
        if lr is None and self.optimizer == "sgd":
            lr = WORKLOADS[self.model].default_lr
        elif lr is None:
            lr = float(mx.optimizer.create(self.optimizer).learning_rate)
        check_lr(lr)
        object.__setattr__(self, "lr", lr)
        if self.momentum is None:
            object.__setattr__(self, "momentum", default_momentum(self.optimizer))
        self._check_optimizer()
        self._check_schedule()
        self._check_files()

    def _check_types(self) -> None:
        """Check all fields; make strings of paths, and tuples of lists."""
        for field in fields(self):
            value, (kind, *optional) = getattr(self, field.name), str(field.type).split(" | ")
            if value is None and optional:
                continue
            types, words = _TYPES[kind]
            if not isinstance(value, types) or isinstance(value, bool) != (kind == "bool"):
                raise TypeError(f"{field.name} must be {words}, got {value!r}")
            if kind == "str" or kind.startswith("tuple"):
                plain = os.fspath(value) if kind == "str" else tuple(value)
                object.__setattr__(self, field.name, plain)

    def _check_optimizer(self) -> None:
        if not 0 <= self.wd < math.inf:
            raise ValueError(f"wd must be a finite number of at least 0, got {self.wd}")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and less than 1, got {self.momentum}")
        takers = [name for name in optimizer_names() if default_momentum(name) is not None]
        takers.remove("dcasgd")  # its update fails in MXNet 1.9.1 if it has a momentum
        if self.momentum and self.optimizer not in takers:
            raise ValueError(
                f"momentum={self.momentum:g}, but optimizer {self.optimizer} takes none; these do: "
                f"{', '.join(takers)}"
            )

    def _check_schedule(self) -> None:
        if (self.lr_schedule == "step") != (self.lr_steps is not None):
            raise ValueError(
                "lr_schedule='step' and lr_steps, the epochs after which the learning rate falls, "
                f"need each other; got lr_schedule={self.lr_schedule!r}, lr_steps={self.lr_steps}"
            )
        steps = list(self.lr_steps or ())
        if steps != sorted({*steps}) or not all(isinstance(s, int) and s >= 1 for s in steps):
            raise ValueError(
                f"lr_steps must be increasing numbers of epochs, such as 2,3, got {steps}"
            )
        if self.lr_steps is None and self.lr_factor != Configuration.lr_factor:
            raise ValueError("lr_factor is for lr_schedule='step': give lr_steps too")
        if not 0 < self.lr_factor < 1:
            raise ValueError(f"lr_factor must be between 0 and 1, got {self.lr_factor}")
        if not 0 <= self.warmup_epochs < self.num_epochs:
            raise ValueError(
                f"warmup_epochs must be at least 0 and less than num_epochs={self.num_epochs}, got "
                f"{self.warmup_epochs}"
            )

    def _check_files(self) -> None:
        for name in ("plot", "history", "save_dir", "tensorboard"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must name a file or folder, got ''")
        if self.save_dir is None:
            for name in ("save_every", "keep", "onnx"):
                if getattr(self, name) != getattr(Configuration, name):
                    raise ValueError(f"{name} needs a folder for files: give save_dir too")
            if self.resume == "":
                raise ValueError("resume without a value needs save_dir: give one, or a checkpoint")
        if self.onnx:
            try:
                onnx_export.check_onnx()
            except ImportError as error:
                raise ValueError(f"onnx files cannot be written: {error}") from error

    def optimizer_arguments(self) -> dict[str, Any]:
        """Return the optimizer's arguments: the learning rate, and the others that were chosen."""
        defaults = {"momentum": default_momentum(self.optimizer), "wd": 0}
        changed = {k: getattr(self, k) for k, v in defaults.items() if getattr(self, k) != v}
        return {"learning_rate": self.lr, **changed}

    def learning_rates(self, num_batches: int) -> Callable[[int], float]:
        """Return a function from the number of an update to its learning rate.

        Update n of N, from 1, with W of them in ``warmup_epochs``, has the learning rate

        - ``lr * n / W`` if n < W; and from there on
        - 'constant': ``lr``;
        - 'step': ``lr * lr_factor ** k`` after k of the epochs in ``lr_steps``;
        - 'cosine': ``lr * (1 + cos(pi * (n - W) / (N + 1 - W))) / 2``, which ends just above 0.

        These are the values of ``mx.lr_scheduler``, whose objects change when they are called.
        """
        num_updates = num_batches * self.num_epochs
        warmup = round(self.warmup_epochs * num_batches)
        lr, steps = float(self.lr or 0), self.lr_steps or ()

        def learning_rate(n: int) -> float:
            if n < warmup:
                return lr * n / warmup
            if self.lr_schedule == "cosine":
                done = min(1.0, (n - warmup) / (num_updates + 1 - warmup))
                return lr * (1 + math.cos(math.pi * done)) / 2
            return lr * self.lr_factor ** sum(n > epoch * num_batches for epoch in steps)

        return learning_rate

    def describe_training(self) -> str:
        """Return the learning rate, and the other options of the update that were chosen."""
        names = ("optimizer", "lr_schedule", "lr_steps", "lr_factor", "warmup_epochs")
        chosen = [name for name in names if getattr(self, name) != getattr(Configuration, name)]
        chosen += [name for name in self.optimizer_arguments() if name != "learning_rate"]
        values = {name: getattr(self, name) for name in ("lr", *chosen)}
        if self.lr_steps is not None:
            values["lr_steps"] = ",".join(map(str, self.lr_steps))  # as on the command line
        return ", ".join(f"{name} {value}" for name, value in values.items())
