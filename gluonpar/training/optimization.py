"""The optimizer of a run, and its learning rate in each update."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Callable

import mxnet as mx

if TYPE_CHECKING:
    from gluonpar.training.configuration import Configuration

SCHEDULES = ("constant", "step", "cosine")


# Registered, but no use here: MXNet's Adamax divides 0 by 0 where a gradient has always been 0,
# GroupAdaGrad takes matrices only, and "test" is of MXNet's own tests.
_EXCLUDED = ("adamax", "groupadagrad", "test")


def names() -> list[str]:
    """Return the names of MXNet's registered optimizers that can train these models."""
    return sorted({*mx.optimizer.Optimizer.opt_registry} - {*_EXCLUDED})


def arguments(configuration: Configuration) -> dict[str, Any]:
    """Return the optimizer's arguments, the learning rate and what is not MXNet's default."""
    defaults = {"momentum": default_momentum(configuration.optimizer), "wd": 0}
    given = {name: getattr(configuration, name) for name in defaults}
    others = {name: value for name, value in given.items() if value != defaults[name]}
    return {"learning_rate": configuration.lr, **others}


def default_lr(name: str) -> float:
    """Return the learning rate that MXNet's optimizer ``name`` has by default."""
    return float(mx.optimizer.create(name).learning_rate)


def default_momentum(name: str) -> float | None:
    """Return the momentum that MXNet's optimizer ``name`` has by default; None: it takes none."""
    return getattr(mx.optimizer.create(name), "momentum", None)


def check(configuration: Configuration) -> None:
    """Raise ValueError unless optimizer, momentum, wd and the schedule are possible."""
    config = configuration
    if not 0 <= config.wd < math.inf:
        raise ValueError(f"wd must be a finite number of at least 0, got {config.wd}")
    if config.momentum is not None and not 0 <= config.momentum < 1:
        raise ValueError(f"momentum must be at least 0 and less than 1, got {config.momentum}")
    takers = [name for name in names() if default_momentum(name) is not None]
    takers.remove("dcasgd")  # its update fails in MXNet 1.9.1 if it has a momentum
    if config.momentum and config.optimizer not in takers:
        raise ValueError(
            f"momentum={config.momentum:g}, but optimizer {config.optimizer} takes none; these do: "
            f"{', '.join(takers)}"
        )
    if config.lr_schedule not in SCHEDULES:
        what = f"lr_schedule must be one of {', '.join(SCHEDULES)}"
        raise ValueError(f"{what}, got {config.lr_schedule!r}")
    if (config.lr_schedule == "step") != (config.lr_steps is not None):
        raise ValueError(
            "lr_schedule='step' and lr_steps, the epochs after which the learning rate falls, need "
            f"each other; got lr_schedule={config.lr_schedule!r}, lr_steps={config.lr_steps}"
        )
    steps = list(config.lr_steps or ())
    if steps != sorted({*steps}) or not all(isinstance(s, int) and s >= 1 for s in steps):
        raise ValueError(f"lr_steps must be increasing numbers of epochs, such as 2,3, got {steps}")
    if not 0 < config.lr_factor < 1:
        raise ValueError(f"lr_factor must be between 0 and 1, got {config.lr_factor}")
    if not 0 <= config.warmup_epochs < config.num_epochs:
        raise ValueError(
            f"warmup_epochs must be at least 0 and less than num_epochs={config.num_epochs}, got "
            f"{config.warmup_epochs}"
        )


def schedule(configuration: Configuration, num_batches: int) -> Callable[[int], float]:
    """Return a function from the number of an update to its learning rate.

    Update n of N, from 1, with W of them in ``warmup_epochs``, has the learning rate

    - ``lr * n / W`` if n < W; and from there on
    - 'constant': ``lr``;
    - 'step': ``lr * lr_factor ** k`` after k of the epochs in ``lr_steps``;
    - 'cosine': ``lr * (1 + cos(pi * (n - W) / (N + 1 - W))) / 2``, which ends just above 0.

    These are the values of ``mx.lr_scheduler``, whose objects change when they are called.
    """
    config, num_updates = configuration, num_batches * configuration.num_epochs
    warmup = round(config.warmup_epochs * num_batches)

    def learning_rate(n: int) -> float:
        if n < warmup:
            return config.lr * n / warmup
        if config.lr_schedule == "step":
            return config.lr * config.lr_factor ** sum(n > e * num_batches for e in config.lr_steps)
        if config.lr_schedule == "cosine":
            done = min(1.0, (n - warmup) / (num_updates + 1 - warmup))
            return config.lr * (1 + math.cos(math.pi * done)) / 2
        return config.lr

    return learning_rate


def describe(configuration: Configuration) -> str:
    """Return optimizer and learning rate in words, such as "adam, lr 0.001, cosine"."""
    config = configuration
    momentum = config.momentum != default_momentum(config.optimizer)
    steps = ", ".join(map(str, config.lr_steps or ()))
    step = f"times {config.lr_factor:g} after epoch{'s' * (len(steps) > 1)} {steps}"
    warmup = f"{config.warmup_epochs:g} epoch{'s' * (config.warmup_epochs != 1)}"
    parts = [
        config.optimizer if config.optimizer != "sgd" else "",
        f"lr {config.lr:g}",
        {"constant": "", "step": step, "cosine": "cosine"}[config.lr_schedule],
        f"warm-up of {warmup}" if config.warmup_epochs else "",
        f"momentum {config.momentum:g}" if momentum else "",
        f"wd {config.wd:g}" if config.wd else "",
    ]
    return ", ".join(filter(None, parts))
