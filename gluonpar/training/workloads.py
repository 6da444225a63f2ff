"""The workloads of a run: a model, its replicas, a training step, evaluation and files.

Dive into Deep Learning, 13.5 and 13.6.
"""

# ruff: noqa: D102 (LeNetWorkload documents the methods)
from __future__ import annotations

from typing import Any, Union

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluonpar import metrics
from gluonpar.batch_norm import running_statistics
from gluonpar.checkpoint import export_onnx, files
from gluonpar.gluon import Trainer
from gluonpar.models import lenet, resnet, softmax_cross_entropy
from gluonpar.options import Configuration
from gluonpar.replicas import get_params
from gluonpar.runtime import cached_op
from gluonpar.sharding import split_and_load
from gluonpar.step import train_batch

# With the book's 0.01 the first epoch stays at chance level, and four epochs end at 0.72 to 0.77.
INIT_SCALE = 0.05
PIXELS = (1, 1, 28, 28)


class LeNetWorkload:
    """LeNet as a plain function, trained by :func:`train_batch`.

    Other workloads have the same attributes and methods. ``copies`` has, per parameter, its arrays
    on all devices. A checkpoint saves ``trained``, the parameters, and ``trainer``, if it is not
    None. ``sample_bytes`` of memory are what a step on CPU contexts takes per sample, as measured.
    """

    name, sample_bytes = "lenet", 350_000
    trainer = None

    def __init__(self, ctx: list[mx.Context], options: Configuration) -> None:
        self.ctx = ctx
        self.more: Any = {"algorithm": options.algorithm, "weights": options.weights}
        params = lenet.init_lenet(INIT_SCALE)
        self.trained = [get_params(params, c) for c in ctx]
        self.copies = list(zip(*self.trained))

    def step(self, X: np.ndarray, y: np.ndarray, batch_size: int, lr: float) -> list[mx.nd.NDArray]:
        """Train on uint8 images (n, 1, 28, 28), this process's share of ``batch_size`` samples.

        Returns each device's losses, one per sample.
        """
        more = {**self.more, "batch_size": batch_size}
        return train_batch(X, y, self.trained, self.ctx, lr, pixel_lenet, **more)

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Return the share of images whose highest score is at their label."""
        return metrics.accuracy(images, labels, self.trained, self.ctx, pixel_lenet)

    def save(self, path: str) -> None:
        """Write the parameters; if that fails, the file stays as it was."""
        files.save_params(path, self.trained[0])

    def save_onnx(self, path: str) -> None:
        """Write the network as ONNX, from uint8 pixels (n, 1, 28, 28) to scores (n, 10)."""
        export_onnx(path, pixel_lenet, PIXELS, self.trained[0], "uint8")


class GluonWorkload:
    """A Gluon network, trained by a Trainer; subclasses make it, initialised, in ``_network``.

    Training uses each device's own batch statistics; evaluation and files use the mean of the
    devices' running statistics.
    """

    name: str
    sample_bytes = 0

    def _network(self) -> gluon.HybridBlock:
        raise NotImplementedError

    def __init__(self, ctx: list[mx.Context], options: Configuration) -> None:
        self.ctx, self.weights = ctx, options.weights
        self.trained = net = self._network()
        self.scores, self.losses = _OfPixels(net), _OfPixels(net)
        for block in (net, self.losses):
            block.hybridize(static_alloc=True, static_shape=True)
        params = net.collect_params()
        numbers = {"wd": options.wd, "momentum": options.momentum}
        given = {name: value for name, value in numbers.items() if value is not None}
        self.trainer = Trainer(params, options.optimizer, given, algorithm=options.algorithm)
        self.copies = [p.list_data() for p in params.values() if p.grad_req != "null"]

    def step(self, X: np.ndarray, y: np.ndarray, batch_size: int, lr: float) -> list[mx.nd.NDArray]:
        self.trainer.set_learning_rate(lr)
        shards = split_and_load((X, y), self.ctx, weights=self.weights) if len(X) else []
        with autograd.record():
            losses = [self.losses(*shard) for shard in shards]
        if losses:
            autograd.backward(losses)
        self.trainer.step(batch_size)  # sums the gradients and updates
        return losses

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        running_statistics.average_statistics(self.trained)
        nets = [self.scores] * len(self.ctx)
        return metrics.accuracy(images, labels, nets, self.ctx, lambda X, net: net(X))

    def save(self, path: str) -> None:
        files.save_params(path, self.trained)

    def save_onnx(self, path: str) -> None:
        export_onnx(path, self.scores, PIXELS, dtype="uint8")


class ResNet18Workload(GluonWorkload):
    """ResNet-18, trained by a Trainer."""

    name, sample_bytes = "resnet18", 4_000_000
    width = 64

    def _network(self) -> gluon.HybridBlock:
        net = resnet.resnet18(width=self.width)
        net.initialize(mx.init.Xavier(), ctx=self.ctx)
        return net


class _OfPixels(gluon.HybridBlock):
    """A network's scores of uint8 images or, with labels, its losses, in one graph."""

    def __init__(self, net: gluon.HybridBlock) -> None:
        super().__init__()
        self.net = net

    def hybrid_forward(self, F: Any, X: Any, y: Any = None) -> Any:
        scores = self.net(lenet.standardize(X))
        return scores if y is None else softmax_cross_entropy(scores, y)


@cached_op.traceable
def pixel_lenet(X: mx.nd.NDArray, params: list[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Return the scores of uint8 images, which become float32 on the device."""
    return lenet.lenet(lenet.standardize(X), params)


Workload = Union[LeNetWorkload, GluonWorkload]
WORKLOADS = {each.name: each for each in (LeNetWorkload, ResNet18Workload)}
