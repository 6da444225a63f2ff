"""What a run trains: a model, its replicas, a step, and how it is scored and kept.

A learner has what ``train.Run`` asks of one: :class:`LeNet` and :class:`ResNet18` are the chapter's
two ways, from scratch and concise.
"""

from __future__ import annotations

import pathlib
from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluonpar import cluster, metrics
from gluonpar.checkpoint import params_file
from gluonpar.checkpoint.onnx_export import export_onnx
from gluonpar.gluon import running_statistics
from gluonpar.gluon.trainer import Trainer
from gluonpar.models import lenet, resnet
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.replicas import get_params
from gluonpar.runtime import cached_op, memory_limits
from gluonpar.sharding import split_and_load
from gluonpar.step import train_batch

# With the book's 0.01 the first epoch does not leave chance level, and four epochs end at 0.72 to
# 0.77.
INIT_SCALE = 0.05
PIXELS = (1, 1, 28, 28)


class Learner:
    """What is trained on the devices ``ctx``, each holding all parameters.

    ``name`` is that of the model; ``copies`` lists, per parameter, its arrays on all devices.
    ``weights`` are the devices' relative speeds (:func:`split_and_load`); None: all alike.
    ``trained`` and ``trainer`` are what :func:`gluonpar.save_checkpoint` takes.
    """

    name: str
    copies: Sequence[Sequence[mx.nd.NDArray]]
    weights: Sequence[float] | None = None
    trained: gluon.Block | Sequence[Sequence[mx.nd.NDArray]]
    trainer: Trainer | None = None

    def step(
        self, X: np.ndarray, y: np.ndarray, batch_size: int | None = None
    ) -> list[mx.nd.NDArray]:
        """One step on a batch of uint8 images (n, 1, 28, 28); per-sample losses of each device.

        With several processes X and y are this one's part of a batch of ``batch_size`` samples.
        """
        raise NotImplementedError

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Share of images whose highest score is their label's, counted on all devices."""
        raise NotImplementedError

    def save(self, path: pathlib.Path) -> None:
        """Write the parameters to ``path``, whole or not at all."""
        raise NotImplementedError

    def save_onnx(self, path: pathlib.Path) -> None:
        """Write the network as ONNX: from uint8 pixels (n, 1, 28, 28) to scores (n, 10)."""
        raise NotImplementedError

    @property
    def params(self) -> list[mx.nd.NDArray]:
        """The first device's copies."""
        return [arrays[0] for arrays in self.copies]


class LeNet(Learner):
    """LeNet as a plain function, trained by ``train_batch``. Dive into Deep Learning, 13.5."""

    name = "lenet"

    def __init__(self, ctx: Sequence[mx.Context], lr: float, algorithm: str | None = None) -> None:
        self.ctx, self.lr, self.algorithm = list(ctx), lr, algorithm
        params = lenet.init_lenet(INIT_SCALE)
        cluster.broadcast(params)
        self.device_params = [get_params(params, c) for c in self.ctx]
        self.trained, self.copies = self.device_params, list(zip(*self.device_params))

    def step(
        self, X: np.ndarray, y: np.ndarray, batch_size: int | None = None
    ) -> list[mx.nd.NDArray]:
        """See :func:`train_batch`."""
        options = {"algorithm": self.algorithm, "weights": self.weights, "batch_size": batch_size}
        return train_batch(X, y, self.device_params, self.ctx, self.lr, pixel_lenet, **options)

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """See :func:`metrics.accuracy`."""
        return metrics.accuracy(images, labels, self.device_params, self.ctx, pixel_lenet)

    def save(self, path: pathlib.Path) -> None:
        """See :func:`checkpoint.save_params`."""
        params_file.save_params(path, self.device_params[0])

    def save_onnx(self, path: pathlib.Path) -> None:
        """See :func:`export_onnx`."""
        export_onnx(path, pixel_lenet, PIXELS, self.device_params[0], "uint8")


class ResNet18(Learner):
    """ResNet-18 as Gluon blocks, trained by a Trainer. Dive into Deep Learning, 13.6.

    Batch normalisation takes each device's own statistics while training. Evaluation and files take
    the running statistics' mean over devices.
    """

    name = "resnet18"

    def __init__(
        self,
        ctx: Sequence[mx.Context],
        lr: float,
        algorithm: str | None = None,
        width: int = 64,
    ) -> None:
        self.ctx = list(ctx)
        self.trained = self.net = resnet.resnet18(width=width)
        self.net.initialize(mx.init.Xavier(), ctx=self.ctx)
        self.losses = _PixelLoss(self.net)
        for block in (self.net, self.losses):
            block.hybridize(static_alloc=True, static_shape=True)
        params = self.net.collect_params()
        self.trainer = Trainer(params, "sgd", {"learning_rate": lr}, algorithm)
        self.copies = [p.list_data() for p in params.values() if p.grad_req != "null"]

    def step(
        self, X: np.ndarray, y: np.ndarray, batch_size: int | None = None
    ) -> list[mx.nd.NDArray]:
        """Forward, backward on all devices; the Trainer does the rest."""
        shards = split_and_load((X, y), self.ctx, weights=self.weights) if len(X) else []
        with autograd.record():
            losses = [self.losses(*shard) for shard in shards]
        if losses:
            autograd.backward(losses)
        self.trainer.step(len(X) if batch_size is None else batch_size)
        return losses

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """See :func:`metrics.accuracy`; the running statistics become their mean first."""
        running_statistics.average_statistics(self.net)
        nets = [self.net] * len(self.ctx)
        return metrics.accuracy(images, labels, nets, self.ctx, _score_pixels)

    def save(self, path: pathlib.Path) -> None:
        """A file for ``load_parameters`` of :func:`networks.resnet18`."""
        params_file.save_block(path, self.net)

    def save_onnx(self, path: pathlib.Path) -> None:
        """See :func:`export_onnx`."""
        export_onnx(path, _PixelScores(self.net), PIXELS, dtype="uint8")


class _PixelLoss(gluon.HybridBlock):
    """uint8 images and labels to losses, in one graph."""

    def __init__(self, net: gluon.HybridBlock) -> None:
        super().__init__()
        self.net = net

    def hybrid_forward(self, F, X, y):
        return softmax_cross_entropy(self.net(lenet.standardize(X)), y)


class _PixelScores(gluon.HybridBlock):
    """uint8 images to scores."""

    def __init__(self, net: gluon.HybridBlock) -> None:
        super().__init__()
        self.net = net

    def hybrid_forward(self, F, X):
        return self.net(lenet.standardize(X))


def _score_pixels(X: mx.nd.NDArray, net: gluon.HybridBlock) -> mx.nd.NDArray:
    return net(lenet.standardize(X))


@cached_op.traceable
def pixel_lenet(X: mx.nd.NDArray, params: list[mx.nd.NDArray]) -> mx.nd.NDArray:
    """LeNet on uint8 images: they travel to the device as bytes and become float32 there."""
    return lenet.lenet(lenet.standardize(X), params)


LEARNERS = {learner.name: learner for learner in (LeNet, ResNet18)}

# Bytes that training took at the least, as measured: in all, and for each CPU context and sample.
_NEEDS = {
    "lenet": (250 * memory_limits.MB, 0, 200_000),
    "resnet18": (500 * memory_limits.MB, 300 * memory_limits.MB, 4_000_000),
}
_MORE_ADDRESSES = 400 * memory_limits.MB  # that heaps and stacks reserve and do not fill


def check_room(model: str, ctx: Sequence[mx.Context], batch_size: int) -> None:
    """Raise room.OutOfMemory if there is none to train ``model`` with ``batch_size`` on ``ctx``.

    For CPU contexts; ``batch_size`` is this process's. What passes may still run out of memory.
    """
    if ctx[0].device_type == "cpu":
        in_all, a_context, a_sample = _NEEDS[model]
        num_bytes = in_all + len(ctx) * a_context + batch_size * a_sample
        what = f"a step of {batch_size} samples on {len(ctx)} CPU contexts"
        memory_limits.require(what, num_bytes, num_bytes + _MORE_ADDRESSES)
