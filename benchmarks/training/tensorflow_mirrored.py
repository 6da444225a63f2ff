"""TensorFlow's MirroredStrategy: one process, in which each device is a logical CPU device."""

from __future__ import annotations

from typing import Iterator, Sequence

import numpy as np

from benchmarks.training.training import Training, UnavailableError
from benchmarks.training.workloads import (
    Task,
    channels_last,
    residual_blocks,
)

try:
    import tensorflow as tf
except ImportError:
    tf = None


class Mirrored(Training):
    """TensorFlow's custom loop, traced once. Images are NHWC, TensorFlow's own layout on CPUs.

    ``strategy`` may be TensorFlow's default one, which does nothing on one device.
    """

    version = f"tensorflow {tf.__version__}" if tf else ""

    def __init__(
        self, task: Task, strategy: tf.distribute.Strategy, devices: Sequence[str]
    ) -> None:
        self.X, self.y = task.X, task.y.astype("int32")
        self.strategy, self.devices = strategy, devices
        self.net, self.width = NETS[task.workload], task.width
        self.rate = task.lr / len(task.X)
        each = {  # a replica updates and reads its own copy
            "trainable": False,
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.MEAN,
        }
        with strategy.scope():
            self.params = [tf.Variable(channels_last(v)) for v in task.params]
            self.moving = [tf.Variable(v, **each) for v in task.moving]
        self.traced_step, self.traced_loss = tf.function(self._step), tf.function(self._loss)

    def step(self) -> None:
        """Split the batch, and call the traced step."""
        self.traced_step(*self._split())

    def wait(self) -> None:
        """Do nothing: on CPUs TensorFlow's calls return when they are done."""

    def loss(self) -> float:
        """Return the mean of the shards' losses."""
        return float(self.traced_loss(*self._split())) / len(self.X)

    def _split(self) -> list:
        """Return the images and the labels, each as one value of which a replica has its shard."""
        number = len(self.devices)
        return [self._distribute(np.array_split(array, number)) for array in (self.X, self.y)]

    def _distribute(self, shards: list[np.ndarray]):
        def load(context):
            i = context.replica_id_in_sync_group
            with tf.device(self.devices[i]):
                return tf.constant(shards[i])

        return self.strategy.experimental_distribute_values_from_function(load)

    def _step(self, X, y) -> None:
        gradients = self.strategy.run(self._gradients, (X, y))
        for param, gradient in zip(self.params, gradients):
            self.strategy.extended.update(param, self._descend, (gradient,))

    def _gradients(self, X, y) -> list:
        """Return the sums over all replicas; runs in each of them."""
        with tf.GradientTape() as tape:
            loss, moved = self._forward(X, y)
        for moving, value in zip(self.moving, moved):
            moving.assign(value)
        gradients = tape.gradient(loss, self.params)
        replica = tf.distribute.get_replica_context()
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients)

    def _descend(self, param, gradient) -> None:
        param.assign_sub(self.rate * gradient)

    def _loss(self, X, y):
        losses = self.strategy.run(lambda X, y: self._forward(X, y)[0], (X, y))
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def _forward(self, X, y) -> tuple:
        """Return the shard's summed loss, and its new moving statistics."""
        layers = _Layers(iter(self.params), iter(self.moving))
        scores = self.net(layers, X, self.width)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=scores)
        return tf.reduce_sum(losses), layers.moved


class _Layers:
    """Layers that take the next of the parameters; ``moved`` are the new moving statistics."""

    def __init__(self, params: Iterator[tf.Variable], moving: Iterator[tf.Variable]) -> None:
        self.params, self.moving, self.moved = params, moving, []

    def conv(self, h, stride: int = 1, pad: int = 0):
        """Convolve, with ``pad`` zeros on every side.

        oneDNN's kernels, which are faster, know no explicit padding; with a stride, "SAME" would
        put more zeros on one side.
        """
        padding = "SAME" if pad and stride == 1 else "VALID"
        if pad and stride > 1:
            h = tf.pad(h, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
        return tf.nn.bias_add(
            tf.nn.conv2d(h, next(self.params), stride, padding), next(self.params)
        )

    def norm(self, h):
        """Normalise by the fused operator, whose moving variance has n - 1 in place of n."""
        scale, shift = next(self.params), next(self.params)
        h, *moved = tf.raw_ops.FusedBatchNormV3(
            x=h,
            scale=scale,
            offset=shift,
            mean=next(self.moving),
            variance=next(self.moving),
            epsilon=1e-5,
            exponential_avg_factor=0.1,  # of the new statistics
            is_training=True,
        )[:3]
        self.moved += moved
        return h

    def dense(self, h):
        """Return h W + b."""
        return tf.nn.bias_add(tf.matmul(h, next(self.params)), next(self.params))


def lenet(layers: _Layers, X, width: int):
    """Return the scores of the book's LeNet."""
    h = tf.reshape(X, (-1, 28, 28, 1))
    for _ in range(2):
        h = tf.nn.avg_pool2d(tf.nn.relu(layers.conv(h)), 2, 2, "VALID")
    h = tf.reshape(h, (-1, 800))
    return layers.dense(tf.nn.relu(layers.dense(h)))


def mlp(layers: _Layers, X, width: int):
    """Return the scores of the wide perceptron."""
    h = tf.nn.relu(layers.dense(X))
    return layers.dense(tf.nn.relu(layers.dense(h)))


def resnet18(layers: _Layers, X, width: int):
    """Return the scores of the book's ResNet-18."""
    h = tf.reshape(X, (-1, 28, 28, 1))
    h = tf.nn.relu(layers.norm(layers.conv(h, pad=1)))
    for _, stride in residual_blocks(width):
        inside = tf.nn.relu(layers.norm(layers.conv(h, stride, pad=1)))
        inside = layers.norm(layers.conv(inside, pad=1))
        shortcut = layers.conv(h, stride) if stride > 1 else h
        h = tf.nn.relu(inside + shortcut)
    return layers.dense(tf.reduce_mean(h, (1, 2)))


NETS = {"lenet": lenet, "mlp": mlp, "resnet18": resnet18}


def make(task: Task, one_device: bool = False) -> Training:
    """Return the training of ``task``; ``one_device``: the whole batch on one, no strategy."""
    if tf is None:
        raise UnavailableError(
            "tensorflow cannot be imported; give --tensorflow-python an interpreter that has it"
        )
    if any(kind != "cpu" for kind, _ in task.devices):
        raise UnavailableError("it is measured on CPU devices only")
    tf.config.set_visible_devices([], "GPU")
    number = 1 if one_device else len(task.devices)
    logical = [tf.config.LogicalDeviceConfiguration()] * number
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    strategy = tf.distribute.get_strategy() if one_device else tf.distribute.MirroredStrategy(names)
    return Mirrored(task, strategy, names)
