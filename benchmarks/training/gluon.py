"""gluon.Trainer on a hybridized network, on one context or several."""

from __future__ import annotations

import functools
import importlib
from typing import Callable

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

from benchmarks.training.training import Rank, Training, shard
from benchmarks.training.workloads import NUM_CLASSES, Task, residual_blocks


class Gluon(Training):
    """The fastest way that Gluon documents: static memory and shapes, one backward for all devices.

    ``make_trainer(params, optimizer, optimizer_params)`` returns what updates.
    """

    def __init__(self, task: Task, ctx: list[mx.Context], make_trainer: Callable) -> None:
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
        """Split, run forward and backward, and let the Trainer do the rest."""
        with autograd.record():
            losses = self._losses()
        autograd.backward(losses)
        self.trainer.step(self.batch_size)

    def wait(self) -> None:
        """Wait for all of MXNet's queues."""
        mx.nd.waitall()

    def loss(self) -> float:
        """Return the mean of the shards' losses."""
        moving = [array for param in self.moving for array in param.list_data()]
        kept = [array.copy() for array in moving]
        with autograd.train_mode():
            total = sum(float(loss.sum().asscalar()) for loss in self._losses())
        for array, value in zip(moving, kept):
            array[:] = value
        return total / len(self.X)

    def _losses(self) -> list[mx.nd.NDArray]:
        X_shards = gluon.utils.split_and_load(self.X, self.ctx, even_split=False)
        y_shards = gluon.utils.split_and_load(self.y, self.ctx, even_split=False)
        return [self.losses(self.net(X), y) for X, y in zip(X_shards, y_shards)]


def lenet(width: int = 20) -> nn.HybridSequential:
    """Return the book's LeNet."""
    return _chain(
        nn.Conv2D(width, 3, activation="relu", in_channels=1),
        nn.AvgPool2D(2, 2),
        nn.Conv2D(50, 5, activation="relu", in_channels=width),
        nn.AvgPool2D(2, 2),
        nn.Dense(128, activation="relu", in_units=800),
        nn.Dense(NUM_CLASSES, in_units=128),
    )


def mlp(width: int) -> nn.HybridSequential:
    """Return the wide perceptron."""
    return _chain(
        nn.Dense(width, activation="relu", in_units=784),
        nn.Dense(width, activation="relu", in_units=width),
        nn.Dense(NUM_CLASSES, in_units=width),
    )


def resnet18(width: int) -> nn.HybridSequential:
    """Return the book's ResNet-18."""
    net, inputs = _chain(*_normed_conv(1, width, 1), nn.Activation("relu")), width
    for channels, stride in residual_blocks(width):
        net.add(Residual(inputs, channels, stride))
        inputs = channels
    net.add(nn.GlobalAvgPool2D(), nn.Dense(NUM_CLASSES, in_units=inputs))
    return net


class Residual(nn.HybridBlock):
    """Two 3x3 convolutions with batch normalisation, and a shortcut around them."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        first, last = _normed_conv(inputs, channels, stride), _normed_conv(channels, channels, 1)
        self.inside = _chain(*first, nn.Activation("relu"), *last)
        self.shortcut = None
        if stride > 1:
            self.shortcut = nn.Conv2D(channels, 1, stride, in_channels=inputs)
        self.relu = nn.Activation("relu")

    def hybrid_forward(self, F, X):
        """Add both paths."""
        around = X if self.shortcut is None else self.shortcut(X)
        return self.relu(self.inside(X) + around)


def _normed_conv(inputs: int, channels: int, stride: int) -> list[nn.HybridBlock]:
    conv = nn.Conv2D(channels, 3, stride, padding=1, in_channels=inputs)
    return [conv, nn.BatchNorm(in_channels=channels)]


def _chain(*blocks: nn.HybridBlock) -> nn.HybridSequential:
    net = nn.HybridSequential()
    net.add(*blocks)
    return net


MODELS = {"lenet": lenet, "mlp": mlp, "resnet18": resnet18}


def make(
    task: Task,
    trainer: str = "mxnet",
    kvstore: str = "device",
    one_context: bool = False,
    rank: int | None = None,
    rendezvous: str = "",
) -> Training:
    """Return the training of ``task`` by the Trainer of the package ``trainer``.

    With ``one_context`` on its first device only; with ``rank`` on that rank's shard, alone, so
    that it has no use for ``rendezvous``.
    """
    package = importlib.import_module("mxnet.gluon" if trainer == "mxnet" else trainer)
    make_trainer = functools.partial(package.Trainer, kvstore=kvstore)
    if rank is not None:
        size = len(task.devices)
        training = Gluon(shard(task, rank, size), [mx.cpu()], make_trainer)
        return Rank(rank, size, len(task.X), training)
    ctx = [mx.Context(*device) for device in task.devices]
    return Gluon(task, ctx[:1] if one_context else ctx, make_trainer)
