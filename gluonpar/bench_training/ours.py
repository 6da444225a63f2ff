"""gluonpar's own step, and the floor: the same work without exchange."""

from __future__ import annotations

from typing import Callable, Sequence

import mxnet as mx
from mxnet import autograd, nd

from gluonpar import models, replicas
from gluonpar.losses import softmax_cross_entropy
from gluonpar.optim import sgd
from gluonpar.sharding import split_and_load
from gluonpar.step import train_batch

from .training import Training
from .workloads import Task


class Ours(Training):
    """``train_batch`` with a plain function for a model."""

    def __init__(self, task: Task) -> None:
        self.X, self.y, self.lr = task.X, task.y, task.lr
        self.ctx = [mx.Context(*device) for device in task.devices]
        self.model, adapt = MODELS[task.workload]
        params = [nd.array(adapt(value), ctx=mx.cpu()) for value in task.params]
        self.device_params = [replicas.get_params(params, c) for c in self.ctx]

    def step(self) -> None:
        """What a user would call."""
        train_batch(self.X, self.y, self.device_params, self.ctx, self.lr, self.model)

    def wait(self) -> None:
        """All of MXNet's queues."""
        nd.waitall()

    def loss(self) -> float:
        """The shards' losses."""
        return sum(float(loss.sum().asscalar()) for loss in self._losses()) / len(self.X)

    def _losses(self) -> list[nd.NDArray]:
        return [
            softmax_cross_entropy(self.model(X, params), y)
            for (X, y), params in zip(
                split_and_load((self.X, self.y), self.ctx), self.device_params
            )
        ]


class Floor(Ours):
    """Every device trains alone on its own shard: nothing is exchanged and nobody is waited for."""

    def step(self) -> None:
        """All devices' forward, backward and update, each divided by the shard's own size."""
        with autograd.record():
            losses = self._losses()
        autograd.backward(losses)
        for params, loss in zip(self.device_params, losses):
            sgd(params, self.lr, len(loss))


def mlp(X: nd.NDArray, params: Sequence[nd.NDArray]) -> nd.NDArray:
    """Dense layers with relu between them; weights are (outputs, inputs)."""
    W1, b1, W2, b2, W3, b3 = params
    h = nd.relu(nd.FullyConnected(X, W1, b1, num_hidden=W1.shape[0]))
    h = nd.relu(nd.FullyConnected(h, W2, b2, num_hidden=W2.shape[0]))
    return nd.FullyConnected(h, W3, b3, num_hidden=W3.shape[0])


def _same(value):
    return value


def _outputs_first(value):
    return value.T if value.ndim == 2 else value


# The model, and how it takes a parameter that the workload has with its inputs first.
MODELS: dict[str, tuple[Callable, Callable]] = {
    "lenet": (models.lenet, _same),
    "mlp": (mlp, _outputs_first),
}


def make(task: Task, exchange: bool = True) -> Training:
    """The training of ``task``."""
    return Ours(task) if exchange else Floor(task)
