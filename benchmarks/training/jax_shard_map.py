"""JAX's shard_map over CPU devices of one process: a mesh axis, of which each has its shard."""

from __future__ import annotations

import os
from typing import Callable, Iterator

import numpy as np

from benchmarks.training.training import Training, UnavailableError
from benchmarks.training.workloads import (
    Task,
    channels_last,
    residual_blocks,
)

try:
    import jax
    from jax import lax, nn
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
except ImportError:
    jax = None

_AXIS = "devices"


class Sharded(Training):
    """One jitted step for all devices, whose parameters and moving statistics it replaces.

    The parameters are replicated, the rest is sharded. Images are NHWC, in which XLA's
    convolutions were faster on CPUs than in NCHW.
    """

    version = f"jax {jax.__version__}" if jax else ""

    def __init__(self, task: Task, number: int) -> None:
        self.X, self.y = task.X, task.y.astype("int32")
        self.net, self.width = NETS[task.workload], task.width
        self.rate = task.lr / len(task.X)
        mesh = Mesh(np.array(jax.devices()).reshape(number), (_AXIS,))
        replicated, sharded = PartitionSpec(), PartitionSpec(_AXIS)
        self.shards = NamedSharding(mesh, sharded)
        params = [channels_last(value) for value in task.params]
        moving = [np.stack([value] * number) for value in task.moving]
        self.params = jax.device_put(params, NamedSharding(mesh, replicated))
        self.moving = jax.device_put(moving, self.shards)
        inputs = (replicated, sharded, sharded, sharded)
        step = _shard_map(self._step, mesh, inputs, (replicated, sharded))
        loss = _shard_map(self._loss, mesh, inputs, replicated)
        self.jitted_step, self.jitted_loss = jax.jit(step, donate_argnums=(0, 1)), jax.jit(loss)

    def step(self) -> None:
        """Split the batch, and start the jitted step."""
        batch = jax.device_put((self.X, self.y), self.shards)
        self.params, self.moving = self.jitted_step(self.params, self.moving, *batch)

    def wait(self) -> None:
        """Wait for what the last step computes."""
        jax.block_until_ready((self.params, self.moving))

    def loss(self) -> float:
        """Return the mean of the shards' losses."""
        batch = jax.device_put((self.X, self.y), self.shards)
        return float(self.jitted_loss(self.params, self.moving, *batch)) / len(self.X)

    def _step(self, params: list, moving: list, X, y) -> tuple:
        gradients, moved = jax.grad(self._forward, has_aux=True)(params, moving, X, y)
        gradients = lax.psum(gradients, _AXIS)
        return [p - self.rate * g for p, g in zip(params, gradients)], moved

    def _loss(self, params: list, moving: list, X, y):
        return lax.psum(self._forward(params, moving, X, y)[0], _AXIS)

    def _forward(self, params: list, moving: list, X, y) -> tuple:
        """Return the shard's summed loss, and its new moving statistics."""
        layers = _Layers(iter(params), iter(moving))
        scores = nn.log_softmax(self.net(layers, X, self.width))
        return -jnp.take_along_axis(scores, y[:, None], 1).sum(), layers.moved


def _shard_map(f: Callable, mesh: Mesh, inputs: tuple, outputs) -> Callable:
    """Return JAX's shard_map of ``f``, of which the replicated results are not checked."""
    specs = {"mesh": mesh, "in_specs": inputs, "out_specs": outputs}
    if hasattr(jax, "shard_map"):
        return jax.shard_map(f, **specs, check_vma=False)
    from jax.experimental.shard_map import shard_map  # where older ones have it

    return shard_map(f, **specs, check_rep=False)


class _Layers:
    """Layers that take the next of the parameters; ``moved`` are the new moving statistics."""

    def __init__(self, params: Iterator, moving: Iterator) -> None:
        self.params, self.moving, self.moved = params, moving, []

    def conv(self, h, stride: int = 1, pad: int = 0):
        """Convolve, with ``pad`` zeros on every side."""
        layout = ("NHWC", "HWIO", "NHWC")
        pads = [(pad, pad), (pad, pad)]
        h = lax.conv_general_dilated(
            h, next(self.params), (stride, stride), pads, dimension_numbers=layout
        )
        return h + next(self.params)

    def norm(self, h):
        """Normalise with the shard's statistics."""
        scale, shift = next(self.params), next(self.params)
        now = h.mean((0, 1, 2)), h.var((0, 1, 2))
        self.moved += [0.9 * next(self.moving) + 0.1 * value for value in now]
        mean, variance = now
        return (h - mean) * (scale * lax.rsqrt(variance + 1e-5)) + shift

    def dense(self, h):
        """Return h W + b."""
        return h @ next(self.params) + next(self.params)


def lenet(layers: _Layers, X, width: int):
    """Return the scores of the book's LeNet."""
    h = X.reshape(-1, 28, 28, 1)
    for _ in range(2):
        h = nn.relu(layers.conv(h))
        h = lax.reduce_window(h, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    h = h.reshape(len(h), -1)
    return layers.dense(nn.relu(layers.dense(h)))


def mlp(layers: _Layers, X, width: int):
    """Return the scores of the wide perceptron."""
    h = nn.relu(layers.dense(X))
    return layers.dense(nn.relu(layers.dense(h)))


def resnet18(layers: _Layers, X, width: int):
    """Return the scores of the book's ResNet-18."""
    h = X.reshape(-1, 28, 28, 1)
    h = nn.relu(layers.norm(layers.conv(h, pad=1)))
    for _, stride in residual_blocks(width):
        inside = nn.relu(layers.norm(layers.conv(h, stride, pad=1)))
        inside = layers.norm(layers.conv(inside, pad=1))
        shortcut = layers.conv(h, stride) if stride > 1 else h
        h = nn.relu(inside + shortcut)
    return layers.dense(h.mean((1, 2)))


NETS = {"lenet": lenet, "mlp": mlp, "resnet18": resnet18}


def make(task: Task, one_device: bool = False) -> Training:
    """Return the training of ``task``; ``one_device``: the whole batch on one."""
    if jax is None:
        raise UnavailableError(
            "jax cannot be imported; give --jax-python an interpreter that has it"
        )
    if any(kind != "cpu" for kind, _ in task.devices):
        raise UnavailableError("it is measured on CPU devices only")
    number = 1 if one_device else len(task.devices)
    if len(task.X) % number:
        raise UnavailableError(
            "JAX shards evenly; the batch size must be a multiple of the devices"
        )
    jax.config.update("jax_platforms", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={number}"
    return Sharded(task, number)
