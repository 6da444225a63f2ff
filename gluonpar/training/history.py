"""Records of a run: one epoch's results, the whole run's, and how far the run has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Sequence

import mxnet as mx


@dataclass(frozen=True)
class Epoch:
    """Results of one epoch. ``seconds`` is its training time, without the evaluation after it."""

    epoch: int
    seconds: float
    loss: float
    test_accuracy: float
    images_per_second: float


@dataclass
class History:
    """Results of a run. ``params`` are the trained parameters on the first context of ``ctx``."""

    ctx: Sequence[mx.Context]
    epochs: list[Epoch] = field(default_factory=list)
    params: list[mx.nd.NDArray] = field(default_factory=list)
    model: str = "lenet"


@dataclass
class Progress:
    """How far a run has come, as a checkpoint stores it.

    ``batch`` batches of epoch ``epoch`` (from 1) are done, in ``seconds`` of training time;
    ``loss_sum`` is the sum of their samples' losses. ``history`` has the epochs before.
    """

    epoch: int = 1
    batch: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    history: list[Epoch] = field(default_factory=list)
