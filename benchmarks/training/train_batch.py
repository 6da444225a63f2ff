"""gluonpar's own step, and the same work without exchange."""

from __future__ import annotations

import gc
from typing import Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

import gluonpar
from benchmarks.training import resnet, workloads
from benchmarks.training.training import Training
from benchmarks.training.workloads import Task
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.runtime import cached_op, memory


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

    def memory(self) -> list[dict[str, int]]:
        """Count each device's arrays, see :func:`by_purpose`."""
        self.wait()
        return [by_purpose(params, c) for params, c in zip(self.device_params, self.ctx)]

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


def by_purpose(params: Sequence[nd.NDArray], ctx: mx.Context) -> dict[str, int]:
    """Return bytes of a device's "parameters", their "gradients" and all "others" alive on it.

    Memory that several arrays share counts once, for the first of these purposes. Counted are
    arrays that Python can reach, not the workspaces of MXNet's operators. Nothing may be running.
    On a GPU, whose memory has no address here, sizes are added up without "others".
    """
    grads = [param.grad for param in params if param.grad is not None]
    if ctx.device_type != "cpu":
        sums = [sum(map(memory.num_bytes, arrays)) for arrays in (params, grads)]
        return dict(zip(("parameters", "gradients"), sums))
    gc.unfreeze()
    gc.collect()
    arrays = [each for each in gc.get_objects() if issubclass(type(each), nd.NDArray)]
    alive = [each for each in arrays if each.stype == "default" and each.context == ctx]
    covered = [distinct(params), distinct([*params, *grads]), distinct([*params, *grads, *alive])]
    differences = [after - before for before, after in zip([0, *covered], covered)]
    return dict(zip(("parameters", "gradients", "others"), differences))


def distinct(arrays: Iterable[nd.NDArray]) -> int:
    """Return the bytes of memory that the arrays cover; that of an array and its views once.

    >>> whole = mx.nd.zeros((4,))
    >>> distinct([whole[:3], whole[2:]])
    16
    """
    views = [memory.view(array) for array in arrays if array.size]
    total = end = 0
    for start, num_bytes in sorted((view.ctypes.data, view.nbytes) for view in views):
        total += max(0, start + num_bytes - max(start, end))
        end = max(end, start + num_bytes)
    return total
