"""gluonpar's own step, and the floor: the same work without exchange."""

from __future__ import annotations

import functools
from typing import Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from gluonpar import replicas
from gluonpar.models import lenet
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.optim import sgd
from gluonpar.runtime import cached_op, threads
from gluonpar.sharding import split_and_load
from gluonpar.step import train_batch

from . import held, resnet
from .training import Training
from .workloads import NUM_CLASSES, Task


class Ours(Training):
    """``train_batch`` with a plain function for a model.

    A model's last parameters are the moving statistics of its batch normalisations: they have no
    gradient, and no update.
    """

    def __init__(self, task: Task) -> None:
        self.X, self.y, self.lr, self.num_trained = task.X, task.y, task.lr, len(task.params)
        self.ctx = [mx.Context(*device) for device in task.devices]
        threads.share(self.ctx)  # before any array is made, as train() does
        self.model, adapt = MODELS[task.workload](task.width)
        params = [nd.array(adapt(value), ctx=mx.cpu()) for value in task.params + task.moving]
        moving = range(self.num_trained, len(params))
        self.device_params = [replicas.get_params(params, c, frozen=moving) for c in self.ctx]

    def step(self) -> None:
        """What a user would call."""
        train_batch(self.X, self.y, self.device_params, self.ctx, self.lr, self.model)

    def wait(self) -> None:
        """All of MXNet's queues."""
        nd.waitall()

    def loss(self) -> float:
        """The shards' losses."""
        n = self.num_trained
        copies = [[*params[:n], *(p.copy() for p in params[n:])] for params in self.device_params]
        with autograd.train_mode():
            losses = self._losses(copies)
        return sum(float(loss.sum().asscalar()) for loss in losses) / len(self.X)

    def values(self) -> list[list[np.ndarray]]:
        """Without the moving statistics, which are each device's own."""
        n = self.num_trained
        return [[param.asnumpy() for param in params[:n]] for params in self.device_params]

    def memory(self) -> list[dict[str, int]]:
        """On CPU devices; see :mod:`held`."""
        self.wait()
        return [held.by_purpose(params, c) for params, c in zip(self.device_params, self.ctx)]

    def _losses(self, device_params: Sequence[Sequence[nd.NDArray]]) -> list[nd.NDArray]:
        return [
            cached_op.losses(self.model, softmax_cross_entropy, X, y, params)
            for (X, y), params in zip(split_and_load((self.X, self.y), self.ctx), device_params)
        ]


class Floor(Ours):
    """Every device trains alone on its own shard: nothing is exchanged and nobody is waited for."""

    def step(self) -> None:
        """All devices' forward, backward and update, each divided by the shard's own size."""
        with autograd.record():
            losses = self._losses(self.device_params)
        autograd.backward(losses)
        for params, loss in zip(self.device_params, losses):
            sgd(params, self.lr, len(loss))


@functools.lru_cache(None)
def mlp(width: int) -> Callable:
    """A model: dense layers with relu between them; weights are (outputs, inputs)."""

    @cached_op.traceable
    def model(X: nd.NDArray, params: Sequence[nd.NDArray]) -> nd.NDArray:
        F, h = cached_op.operators(X), X
        for i, size in enumerate((width, width, NUM_CLASSES)):
            h = lenet.relu(h) if i else h
            h = F.FullyConnected(h, params[2 * i], params[2 * i + 1], num_hidden=size)
        return h

    return model


@functools.lru_cache(None)
def resnet18(width: int) -> Callable:
    """A model: ResNet-18, its weights as in the book."""

    @cached_op.traceable
    def model(X: nd.NDArray, params: Sequence[nd.NDArray]) -> nd.NDArray:
        return resnet.resnet18(cached_op.operators(X), X, params, width)

    return model


def _same(value):
    return value


def _outputs_first(value):
    return value.T if value.ndim == 2 else value


# From the first layer's width to the model, and what it wants done to a parameter.
MODELS = {
    "lenet": lambda width: (lenet.lenet, _same),
    "mlp": lambda width: (mlp(width), _outputs_first),
    "resnet18": lambda width: (resnet18(width), _same),
}


def make(task: Task, exchange: bool = True) -> Training:
    """The training of ``task``."""
    return Ours(task) if exchange else Floor(task)
