"""A training step on K devices, by gluonpar and by MXNet's own gluon.Trainer, in turns.

A step is what a user's loop does: split a batch in the host's memory and load it onto the devices,
forward, backward, all-reduce, update. All candidates of a workload start from the same parameters
and train on the same batch, so they must come to the same loss.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Callable, List, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluonpar.diagnostics.benchmark import harness
from gluonpar.diagnostics.benchmark.harness import Candidate, Samples
from gluonpar.gluon.trainer import Trainer
from gluonpar.models import lenet, resnet
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.replicas import get_params
from gluonpar.runtime import threads
from gluonpar.sharding import split_and_load
from gluonpar.step import train_batch

OURS, PEERS = "gluonpar", ("mxnet device", "mxnet nccl")
BATCH_SIZES = {"lenet": 256, "resnet18": 64}  # per device
LR = {"lenet": 0.25, "resnet18": 0.0015}  # the loss falls by a tenth or more in a step
SEED, INIT_SCALE = 7, 0.05
WARMUP_STEPS = 3  # MXNet traces graphs, and cuDNN tries its algorithms
SAMPLE_SECONDS, MAX_STEPS = 0.1, 10  # a sample is several steps, as long as they are short

Step = Callable[[], List[mx.nd.NDArray]]  # returns each device's losses, one per sample


@dataclass(frozen=True)
class StepTimes:
    """One candidate on K devices; samples are seconds of one step, ``loss`` that after warm-up.

    In JSON a loss that is not finite is null.
    """

    workload: str
    name: str
    num_devices: int
    batch_size: int
    samples: Samples
    loss: float

    @property
    def images_per_second(self) -> float:
        """At the median step, on all devices."""
        return self.batch_size / self.samples.median

    def as_dict(self) -> dict[str, Any]:
        """Return everything, with all samples, for JSON."""
        fields = {**vars(self), "images_per_second": self.images_per_second}
        fields["loss"] = self.loss if math.isfinite(self.loss) else None
        del fields["samples"]
        return {**fields, **self.samples.as_dict()}


def candidates(ctx: Sequence[mx.Context]) -> list[str]:
    """Return the candidates' names: gluonpar and, by kvstore, MXNet's Trainer.

    The store 'nccl' exists on GPUs only. With one device MXNet uses no store.
    """
    exchanging_gpus = len(ctx) > 1 and all(context.device_type == "gpu" for context in ctx)
    return [OURS, *PEERS] if exchanging_gpus else [OURS, PEERS[0]]


def measure(
    workload: str,
    ctx: Sequence[mx.Context],
    names: Sequence[str],
    batch_size: int,
    rounds: int,
    progress: harness.Progress = iter,
    announce: Callable[[str], object] = lambda name: None,
) -> list[StepTimes]:
    """Time the candidates ``names`` of "lenet" or "resnet18" with ``batch_size`` per device.

    ``announce`` is called with a candidate's name when its turn comes, and after a step of warm-up.
    """
    threads.share(list(ctx))
    total, rng = batch_size * len(ctx), np.random.default_rng(SEED)
    X = rng.standard_normal((total, 1, 28, 28), "float32")
    y = rng.integers(2, size=total).astype("float32")
    steps: dict[str, Step] = {}
    loss, seconds = {}, []
    for name in names:
        announce(name)
        step = steps[name] = _make(workload, name, list(ctx), X, y)
        for _ in range(WARMUP_STEPS):
            losses = step()
            mx.nd.waitall()
            announce(name)
        loss[name] = sum(float(part.sum().asscalar()) for part in losses) / total
        seconds.append(Candidate(name, step, mx.nd.waitall).sample())
    steps_per_sample = int(min(MAX_STEPS, max(1, SAMPLE_SECONDS / max(seconds))))
    in_turns = [
        Candidate(
            name,
            functools.partial(_repeat, step, steps_per_sample),
            mx.nd.waitall,
            functools.partial(announce, name),
        )
        for name, step in steps.items()
    ]
    samples = harness.interleaved(in_turns, rounds, 1, progress)
    return [
        StepTimes(
            workload,
            name,
            len(ctx),
            total,
            Samples(tuple(value / steps_per_sample for value in found.values)),
            loss[name],
        )
        for name, found in samples.items()
    ]


def _repeat(step: Step, times: int) -> None:
    for _ in range(times):
        step()


def _make(workload: str, name: str, ctx: list[mx.Context], X: np.ndarray, y: np.ndarray) -> Step:
    """Return the step of a candidate, which has its own copies of the same initial parameters."""
    mx.random.seed(SEED)
    net = lenet.LeNet(INIT_SCALE) if workload == "lenet" else resnet.resnet18()
    net.initialize(mx.init.Xavier(), ctx=ctx)
    params, lr = net.collect_params(), LR[workload]
    if (workload, name) == ("lenet", OURS):
        start = [param.data(ctx[0]) for param in params.values()]
        device_params = [get_params(start, context) for context in ctx]
        return lambda: train_batch(X, y, device_params, ctx, lr)
    with_loss = _Losses(net)
    with_loss.hybridize(static_alloc=True, static_shape=True)
    if name == OURS:
        trainer = Trainer(params, "sgd", {"learning_rate": lr})
    else:
        trainer = gluon.Trainer(params, "sgd", {"learning_rate": lr}, kvstore=name.split()[1])

    def step() -> list[mx.nd.NDArray]:
        if name == OURS:
            shards = split_and_load((X, y), ctx)
        else:
            shards = zip(*(gluon.utils.split_and_load(array, ctx) for array in (X, y)))
        with autograd.record():
            losses = [with_loss(*shard) for shard in shards]
        autograd.backward(losses)
        trainer.step(len(X))
        return losses

    return step


class _Losses(gluon.HybridBlock):
    """Network and loss in one graph."""

    def __init__(self, net: gluon.HybridBlock) -> None:
        super().__init__()
        self.net = net

    def hybrid_forward(self, F, X, y):
        return softmax_cross_entropy(self.net(X), y)
