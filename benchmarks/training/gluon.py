"""gluon.Trainer on a hybridized network, on one context or several."""

from __future__ import annotations

import importlib
from typing import Callable

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from . import alone
from .training import Training
from .workloads import NUM_CLASSES, Task

networks = alone.load("models/resnet")


class Gluon(Training):
    """The fastest that Gluon documents: static memory and shapes, one backward for all devices.

    ``make_trainer(params, optimizer, optimizer_params)`` is what updates; ``split((X, y), ctx)``
    gives the shards, Gluon's own by default.
    """

    def __init__(
        self,
        task: Task,
        ctx: list[mx.Context],
        make_trainer: Callable,
        split: Callable | None = None,
    ) -> None:
        self.split = split or split_and_load
        self.X, self.y, self.ctx, self.batch_size = task.X, task.y, ctx, len(task.X)
        self.net = MODELS[task.workload](task.width)
        self.losses = gluon.loss.SoftmaxCrossEntropyLoss()
        self.net.initialize(ctx=ctx)
        every = self.net.collect_params()
        self.trained = [param for param in every.values() if param.grad_req != "null"]
        self.moving = [param for param in every.values() if param.grad_req == "null"]
        for param, value in zip(self.trained + self.moving, task.params + task.moving):
            param.set_data(mx.nd.array(value.T if value.ndim == 2 else value))
        for block in (self.net, self.losses):
            block.hybridize(static_alloc=True, static_shape=True)
        self.trainer = make_trainer(every, "sgd", {"learning_rate": task.lr})

    def step(self) -> None:
        """Split, forward, backward; the Trainer does the rest."""
        with autograd.record():
            losses = self._losses()
        autograd.backward(losses)
        self.trainer.step(self.batch_size)

    def wait(self) -> None:
        """All of MXNet's queues."""
        mx.nd.waitall()

    def loss(self) -> float:
        """The shards' losses."""
        moving = [array for param in self.moving for array in param.list_data()]
        kept = [array.copy() for array in moving]
        with autograd.train_mode():
            total = sum(float(loss.sum().asscalar()) for loss in self._losses())
        for array, value in zip(moving, kept):
            array[:] = value
        return total / len(self.X)

    def values(self) -> list[list[np.ndarray]]:
        """Without the moving statistics, which are each device's own."""
        return [[param.data(c).asnumpy() for param in self.trained] for c in self.ctx]

    def _losses(self) -> list[mx.nd.NDArray]:
        shards = self.split((self.X, self.y), self.ctx)
        return [self.losses(self.net(X), y) for X, y in shards]


def split_and_load(batch: tuple, ctx: list[mx.Context]) -> list[tuple]:
    """Gluon's own, of each array of ``batch``."""
    return list(zip(*[gluon.utils.split_and_load(a, ctx, even_split=False) for a in batch]))


def lenet(width: int = 20) -> nn.HybridSequential:
    """The book's LeNet as blocks."""
    return networks.chain(
        nn.Conv2D(width, 3, activation="relu", in_channels=1),
        nn.AvgPool2D(2, 2),
        nn.Conv2D(50, 5, activation="relu", in_channels=width),
        nn.AvgPool2D(2, 2),
        nn.Dense(128, activation="relu", in_units=800),
        nn.Dense(NUM_CLASSES, in_units=128),
    )


def mlp(width: int) -> nn.HybridSequential:
    """The wide perceptron as blocks."""
    return networks.chain(
        nn.Dense(width, activation="relu", in_units=784),
        nn.Dense(width, activation="relu", in_units=width),
        nn.Dense(NUM_CLASSES, in_units=width),
    )


def resnet18(width: int) -> nn.HybridSequential:
    """The book's ResNet-18 as blocks: gluonpar's, which is of MXNet only."""
    return networks.resnet18(NUM_CLASSES, width)


MODELS = {"lenet": lenet, "mlp": mlp, "resnet18": resnet18}


def make(
    task: Task,
    one_context: bool = False,
    share_threads: bool = False,
    kvstore: str = "device",
    trainer: str = "mxnet.gluon.Trainer",
    split: str = "",
    imports: str = "",
) -> Training:
    """The training of ``task``, on its first device only if so asked.

    ``trainer`` names a class that is called as gluon.Trainer is; with no ``kvstore`` it gets none.
    ``split`` names what cuts the batch, if not Gluon's function.
    ``imports`` names a module that must have been imported, for what it registers.
    """
    ctx = [mx.Context(*device) for device in task.devices]
    if share_threads:
        from gluonpar.runtime import threads

        threads.share(ctx)
    if imports:
        importlib.import_module(imports)
    kind, cut = _named(trainer), _named(split) if split else None
    more = {"kvstore": kvstore} if kvstore else {}
    return Gluon(task, ctx[:1] if one_context else ctx, lambda *given: kind(*given, **more), cut)


def _named(path: str) -> Callable:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
