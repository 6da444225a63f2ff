"""The multi-GPU loop of Dive into Deep Learning, 13.5, from plain MXNet operators."""

from __future__ import annotations

import mxnet as mx
from mxnet import autograd, gluon, nd

from benchmarks.training import resnet
from benchmarks.training.training import Training
from benchmarks.training.workloads import Task


class Book(Training):
    """The loop as in the chapter: one all-reduce and one update per parameter."""

    def __init__(self, task: Task) -> None:
        self.X, self.y, self.lr = task.X, task.y, task.lr
        self.ctx = [mx.Context(*device) for device in task.devices]
        self.model = MODELS[task.workload]
        self.losses = gluon.loss.SoftmaxCrossEntropyLoss()
        self.replicas = [[nd.array(param, ctx=c) for param in task.params] for c in self.ctx]
        for params in self.replicas:
            for param in params:
                param.attach_grad()
        self.moving = [[nd.array(value, ctx=c) for value in task.moving] for c in self.ctx]

    def step(self) -> None:
        """Split, run forward and backward, all-reduce, and update."""
        with autograd.record():
            losses = self._losses(self.moving)
        for loss in losses:
            loss.backward()
        for copies in zip(*self.replicas):
            allreduce([copy.grad for copy in copies])
        for params in self.replicas:
            sgd(params, self.lr, len(self.X))

    def wait(self) -> None:
        """Wait for all of MXNet's queues."""
        nd.waitall()

    def loss(self) -> float:
        """Return the mean of the shards' losses."""
        copies = [[array.copy() for array in arrays] for arrays in self.moving]
        with autograd.train_mode():
            losses = self._losses(copies)
        return sum(float(loss.sum().asscalar()) for loss in losses) / len(self.X)

    def _losses(self, moving: list[list[nd.NDArray]]) -> list[nd.NDArray]:
        X_shards = gluon.utils.split_and_load(self.X, self.ctx, even_split=False)
        y_shards = gluon.utils.split_and_load(self.y, self.ctx, even_split=False)
        return [
            self.losses(self.model(X, params + statistics), y)
            for X, y, params, statistics in zip(X_shards, y_shards, self.replicas, moving)
        ]


def allreduce(arrays: list[nd.NDArray]) -> None:
    """Sum onto the first device, then copy back."""
    first, *others = arrays
    for other in others:
        first[:] += other.copyto(first.context)
    for other in others:
        first.copyto(other)


def sgd(params: list[nd.NDArray], lr: float, batch_size: int) -> None:
    """Update one device's parameters one by one."""
    for param in params:
        param[:] = param - lr * param.grad / batch_size


def lenet(X: nd.NDArray, params: list[nd.NDArray]) -> nd.NDArray:
    """Return the scores of the chapter's LeNet."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h = nd.relu(nd.Convolution(X, W1, b1, kernel=(3, 3), num_filter=20))
    h = nd.Pooling(h, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h = nd.relu(nd.Convolution(h, W2, b2, kernel=(5, 5), num_filter=50))
    h = nd.Pooling(h, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h = nd.relu(nd.dot(nd.flatten(h), W3) + b3)
    return nd.dot(h, W4) + b4


def mlp(X: nd.NDArray, params: list[nd.NDArray]) -> nd.NDArray:
    """Return the scores of dense layers with relu between them."""
    W1, b1, W2, b2, W3, b3 = params
    h = nd.relu(nd.dot(X, W1) + b1)
    h = nd.relu(nd.dot(h, W2) + b2)
    return nd.dot(h, W3) + b3


def resnet18(X: nd.NDArray, params: list[nd.NDArray]) -> nd.NDArray:
    """Return the scores of ResNet-18; its last parameters are the moving statistics."""
    return resnet.resnet18(nd, X, params, width=params[0].shape[0])


MODELS = {"lenet": lenet, "mlp": mlp, "resnet18": resnet18}


def make(task: Task) -> Training:
    """Return the training of ``task``."""
    return Book(task)
