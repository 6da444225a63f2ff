"""gluon.Trainer on a hybridized network, on one context or several."""

from __future__ import annotations

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .training import Training
from .workloads import Task


class Gluon(Training):
    """The fastest that Gluon documents: static memory and shapes, one backward for all devices."""

    def __init__(self, task: Task, ctx: list[mx.Context]) -> None:
        self.X, self.y, self.ctx = task.X, task.y, ctx
        self.net, self.losses = MODELS[task.workload](), gluon.loss.SoftmaxCrossEntropyLoss()
        self.net.initialize(ctx=ctx)
        for param, value in zip(self.net.collect_params().values(), task.params):
            param.set_data(mx.nd.array(value.T if value.ndim == 2 else value))
        for block in (self.net, self.losses):
            block.hybridize(static_alloc=True, static_shape=True)
        rate = {"learning_rate": task.lr}
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", rate, kvstore="device")

    def step(self) -> None:
        """Split, forward, backward; the Trainer does the rest."""
        with autograd.record():
            losses = self._losses()
        autograd.backward(losses)
        self.trainer.step(len(self.X))

    def wait(self) -> None:
        """All of MXNet's queues."""
        mx.nd.waitall()

    def loss(self) -> float:
        """The shards' losses."""
        return sum(float(loss.sum().asscalar()) for loss in self._losses()) / len(self.X)

    def _losses(self) -> list[mx.nd.NDArray]:
        X_shards = gluon.utils.split_and_load(self.X, self.ctx, even_split=False)
        y_shards = gluon.utils.split_and_load(self.y, self.ctx, even_split=False)
        return [self.losses(self.net(X), y) for X, y in zip(X_shards, y_shards)]


def lenet() -> nn.HybridSequential:
    """The book's LeNet as blocks."""
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(20, 3, activation="relu", in_channels=1),
        nn.AvgPool2D(2, 2),
        nn.Conv2D(50, 5, activation="relu", in_channels=20),
        nn.AvgPool2D(2, 2),
        nn.Dense(128, activation="relu", in_units=800),
        nn.Dense(10, in_units=128),
    )
    return net


def mlp() -> nn.HybridSequential:
    """The wide perceptron as blocks."""
    net = nn.HybridSequential()
    net.add(
        nn.Dense(2048, activation="relu", in_units=784),
        nn.Dense(2048, activation="relu", in_units=2048),
        nn.Dense(10, in_units=2048),
    )
    return net


MODELS = {"lenet": lenet, "mlp": mlp}


def make(task: Task, one_context: bool = False, share_threads: bool = False) -> Training:
    """The training of ``task``, on its first device only if so asked."""
    ctx = [mx.Context(*device) for device in task.devices]
    if share_threads:
        from gluonpar import threads

        threads.share(ctx)
    return Gluon(task, ctx[:1] if one_context else ctx)
