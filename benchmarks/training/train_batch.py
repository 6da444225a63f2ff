"""gluonpar's own step, and the same work without exchange."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

import gluonpar
from benchmarks.training import resnet, workloads
from benchmarks.training.training import Training
from benchmarks.training.workloads import Task
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.runtime import cached_op


class TrainBatch(Training):
    """``train_batch`` with a plain function as its model, as a user would write it.

    A model's last parameters are the moving statistics of its batch normalisations: they have no
    gradient, and no update.
    """

    def __init__(self, task: Task, batch_size: int | None = None) -> None:
        self.X, self.y, self.lr, self.num_trained = task.X, task.y, task.lr, len(task.params)
        self.batch_size = batch_size
        self.ctx = [mx.Context(*device) for device in task.devices]
        self.model, convert = MODELS[task.workload]
        params = [nd.array(convert(value), ctx=mx.cpu()) for value in task.params + task.moving]
        moving = range(self.num_trained, len(params))
        self.device_params = [gluonpar.get_params(params, c, frozen=moving) for c in self.ctx]

    def step(self) -> None:
        """Take a step as a user would."""
        params, n = self.device_params, self.batch_size
        gluonpar.train_batch(self.X, self.y, params, self.ctx, self.lr, self.model, batch_size=n)

    def wait(self) -> None:
        """Wait for all of MXNet's queues."""
        nd.waitall()

    def loss(self) -> float:
        """Return the mean of the shards' losses."""
        n = self.num_trained
        copies = [[*params[:n], *(p.copy() for p in params[n:])] for params in self.device_params]
        with autograd.train_mode():
            losses = self._losses(copies)
        return sum(float(loss.sum().asscalar()) for loss in losses) / len(self.X)

    def _losses(self, device_params: Sequence[Sequence[nd.NDArray]]) -> list[nd.NDArray]:
        shards = gluonpar.split_and_load((self.X, self.y), self.ctx)
        return [
            cached_op.losses(self.model, softmax_cross_entropy, X, y, params)
            for (X, y), params in zip(shards, device_params)
        ]


class WithoutExchange(TrainBatch):
    """Every device trains alone on its own shard, without exchanging or waiting for anything."""

    def step(self) -> None:
        """Run forward, backward and update, each divided by the shard's own size."""
        with autograd.record():
            losses = self._losses(self.device_params)
        autograd.backward(losses)
        for params, loss in zip(self.device_params, losses):
            gluonpar.sgd(params, self.lr, len(loss))


@gluonpar.traceable
def mlp(X: nd.NDArray, params: Sequence[nd.NDArray]) -> nd.NDArray:
    """Return the scores of dense layers with relu between them."""
    F, h, width = gluonpar.operators(X), X, workloads.WORKLOADS["mlp"].parameters[1].shape[0]
    for W, b, size in zip(params[::2], params[1::2], (width, width, workloads.NUM_CLASSES)):
        h = h if h is X else F.Activation(h, act_type="relu")
        h = F.FullyConnected(h, W, b, num_hidden=size)
    return h


@gluonpar.traceable
def resnet18(X: nd.NDArray, params: Sequence[nd.NDArray]) -> nd.NDArray:
    """Return the scores of ResNet-18."""
    width = workloads.WORKLOADS["resnet18"].parameters[1].shape[0]
    return resnet.resnet18(gluonpar.operators(X), X, params, width)


def _same(value: np.ndarray) -> np.ndarray:
    return value


def _transposed(value: np.ndarray) -> np.ndarray:
    return value.T if value.ndim == 2 else value


# By workload: the model, and the conversion of its parameters.
MODELS = {
    "lenet": (gluonpar.lenet, _same),
    "mlp": (mlp, _transposed),
    "resnet18": (resnet18, _same),
}


def make(task: Task, exchange: bool = True) -> Training:
    """Return the training of ``task``."""
    return TrainBatch(task) if exchange else WithoutExchange(task)
