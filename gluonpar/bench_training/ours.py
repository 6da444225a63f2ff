"""gluonpar's own step, and the floor: the same work without exchange."""

from __future__ import annotations

import functools
from typing import Callable, Sequence

import mxnet as mx
from mxnet import autograd, nd

from gluonpar import graph, models, replicas
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
        sizes = tuple(len(bias) for bias in task.params[1::2])
        self.model, adapt = (
            (mlp(sizes), _outputs_first) if task.workload == "mlp" else (models.lenet, _same)
        )
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
            graph.losses(self.model, softmax_cross_entropy, X, y, params)
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


@functools.lru_cache(None)
def mlp(sizes: tuple[int, ...]) -> Callable:
    """A model: dense layers of these sizes, relu between them; weights are (outputs, inputs)."""

    @graph.traceable
    def model(X: nd.NDArray, params: Sequence[nd.NDArray]) -> nd.NDArray:
        F, h = graph.operators(X), X
        for i, size in enumerate(sizes):
            h = F.relu(h) if i else h
            h = F.FullyConnected(h, params[2 * i], params[2 * i + 1], num_hidden=size)
        return h

    return model


def _same(value):
    return value


def _outputs_first(value):
    return value.T if value.ndim == 2 else value


def make(task: Task, exchange: bool = True) -> Training:
    """The training of ``task``."""
    return Ours(task) if exchange else Floor(task)
