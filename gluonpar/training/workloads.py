"""The workloads of a run: a model, its replicas, a training step, evaluation and files.

Dive into Deep Learning, 13.5 and 13.6.
"""

# ruff: noqa: D102 (Workload's docstring describes the methods of its subclasses)
from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

import mxnet as mx
from mxnet import autograd, gluon

from gluonpar import metrics
from gluonpar.batch_norm import running_statistics
from gluonpar.checkpoint import export_onnx, params_file
from gluonpar.gluon import Trainer
from gluonpar.install import memory_limits
from gluonpar.models import lenet, resnet, softmax_cross_entropy
from gluonpar.replicas import get_params
from gluonpar.runtime import cached_op
from gluonpar.sharding import split_and_load
from gluonpar.step import train_batch

if TYPE_CHECKING:
    from gluonpar.training.configuration import Configuration

# With the book's 0.01 the first epoch stays at chance level, and four epochs end at 0.72 to 0.77.
INIT_SCALE = 0.05
PIXELS = (1, 1, 28, 28)


class Workload:
    """A model that is trained on the devices ``ctx``, each of which holds all parameters.

    ``copies`` has, per parameter, its arrays on all devices. ``trained`` and ``trainer`` are what a
    checkpoint saves. Subclasses set these in ``_initialize``. ``needed`` are the bytes that
    training needs at least, as measured: in all, per CPU context, and per sample.
    Subclasses have four methods:

    - ``step(X, y, batch_size)`` trains on uint8 images (n, 1, 28, 28), this process's share of
      ``batch_size`` samples, and returns each device's losses, one per sample;
    - ``accuracy(images, labels)`` is the share of images whose highest score is at their label;
    - ``save(path)`` writes the parameters, and ``save_onnx(path)`` the network as ONNX, from uint8
      pixels (n, 1, 28, 28) to scores (n, 10); the file is complete or unchanged.
    """

    name: str
    default_lr: float
    needed = (0, 0, 0)
    copies: Sequence[Sequence[mx.nd.NDArray]]
    trained: gluon.Block | Sequence[Sequence[mx.nd.NDArray]]
    trainer: Trainer | None = None

    def __init__(self, configuration: Configuration, ctx: list[mx.Context]) -> None:
        self.configuration, self.ctx, self.lr = configuration, ctx, configuration.lr
        self._initialize()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the steps that follow."""
        self.lr = lr
        if self.trainer is not None:
            self.trainer.set_learning_rate(lr)

    @property
    def params(self) -> list[mx.nd.NDArray]:
        """The first device's copies."""
        return [arrays[0] for arrays in self.copies]


class LeNetWorkload(Workload):
    """LeNet as a plain function, trained by :func:`train_batch`."""

    name, default_lr = "lenet", 0.2
    needed = (250 * memory_limits.MB, 0, 200_000)

    def _initialize(self) -> None:
        params = lenet.init_lenet(INIT_SCALE)
        self.trained = [get_params(params, c) for c in self.ctx]
        self.copies = list(zip(*self.trained))

    def step(self, X, y, batch_size):
        config = self.configuration
        options = {"algorithm": config.algorithm, "weights": config.weights}
        options["batch_size"] = batch_size
        return train_batch(X, y, self.trained, self.ctx, self.lr, pixel_lenet, **options)

    def accuracy(self, images, labels):
        return metrics.accuracy(images, labels, self.trained, self.ctx, pixel_lenet)

    def save(self, path):
        params_file.save_params(path, self.params)

    def save_onnx(self, path):
        export_onnx(path, pixel_lenet, PIXELS, self.params, "uint8")


class GluonWorkload(Workload):
    """A Gluon network, trained by a Trainer; subclasses make it, initialised, in ``_network``.

    Training uses each device's own batch statistics; evaluation and files use the mean of the
    devices' running statistics.
    """

    def _network(self) -> gluon.HybridBlock:
        raise NotImplementedError

    def _initialize(self) -> None:
        self.trained = net = self._network()
        self.scores, self.losses = _OfPixels(net), _OfPixels(net)
        for block in (net, self.losses):
            block.hybridize(static_alloc=True, static_shape=True)
        params, config = net.collect_params(), self.configuration
        arguments = config.optimizer_arguments()
        self.trainer = Trainer(params, config.optimizer, arguments, algorithm=config.algorithm)
        self.copies = [p.list_data() for p in params.values() if p.grad_req != "null"]

    def step(self, X, y, batch_size):
        weights = self.configuration.weights
        shards = split_and_load((X, y), self.ctx, weights=weights) if len(X) else []
        with autograd.record():
            losses = [self.losses(*shard) for shard in shards]
        if losses:
            autograd.backward(losses)
        self.trainer.step(batch_size)  # sums the gradients and updates
        return losses

    def accuracy(self, images, labels):
        running_statistics.average_statistics(self.trained)
        nets = [self.scores] * len(self.ctx)
        return metrics.accuracy(images, labels, nets, self.ctx, lambda X, scores: scores(X))

    def save(self, path):
        params_file.save_params(path, self.trained)

    def save_onnx(self, path):
        export_onnx(path, self.scores, PIXELS, dtype="uint8")


class ResNet18Workload(GluonWorkload):
    """ResNet-18, trained by a Trainer."""

    name, default_lr = "resnet18", 0.1
    needed = (500 * memory_limits.MB, 300 * memory_limits.MB, 4_000_000)
    width = 64

    def _network(self):
        net = resnet.resnet18(width=self.width)
        net.initialize(mx.init.Xavier(), ctx=self.ctx)
        return net


class LeNetTrainerWorkload(GluonWorkload):
    """LeNet with any optimizer: the same parameters and files as :class:`LeNetWorkload`'s."""

    name, default_lr = LeNetWorkload.name, LeNetWorkload.default_lr

    def _network(self):
        net = lenet.LeNet(INIT_SCALE)
        net.initialize(ctx=self.ctx)
        return net


class _OfPixels(gluon.HybridBlock):
    """Scores of uint8 images; with their labels their losses, in one graph."""

    def __init__(self, net: gluon.HybridBlock) -> None:
        super().__init__()
        self.net = net

    def hybrid_forward(self, F, X, y=None):
        scores = self.net(lenet.standardize(X))
        return scores if y is None else softmax_cross_entropy(scores, y)


@cached_op.traceable
def pixel_lenet(X: mx.nd.NDArray, params: list[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Return the scores of uint8 images, which become float32 on the device."""
    return lenet.lenet(lenet.standardize(X), params)


WORKLOADS = {workload.name: workload for workload in (LeNetWorkload, ResNet18Workload)}


def make(configuration: Configuration, ctx: list[mx.Context]) -> Workload:
    """Return the workload: LeNet is trained by :func:`train_batch` if the update is plain SGD."""
    kind = WORKLOADS[configuration.model]
    update = configuration.optimizer, *configuration.optimizer_arguments()
    if kind is LeNetWorkload and update != ("sgd", "learning_rate"):
        kind = LeNetTrainerWorkload
    return kind(configuration, ctx)


_UNUSED_ADDRESSES = 400 * memory_limits.MB  # reserved by heaps and stacks, but not filled


def check_memory(model: str, ctx: Sequence[mx.Context], batch_size: int) -> None:
    """Raise memory_limits.OutOfMemoryError if there is too little memory to train on CPU contexts.

    ``batch_size`` is this process's. Training may still run out of memory later.
    """
    if ctx[0].device_type == "cpu":
        base, per_context, per_sample = WORKLOADS[model].needed
        num_bytes = base + len(ctx) * per_context + batch_size * per_sample
        step = f"a step of {batch_size} samples on {len(ctx)} CPU contexts"
        memory_limits.require(step, num_bytes, num_bytes + _UNUSED_ADDRESSES)
