"""Loss and accuracy, accumulated on the devices and read by the host here, nowhere else."""

from __future__ import annotations

import math
from typing import Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet import nd

from gluonpar import cluster
from gluonpar.collectives import partition
from gluonpar.sharding import split_and_load


class Diverged(FloatingPointError):
    """The loss stopped being a finite number; the message names epoch, batch and learning rate."""


class ReplicasDiffer(AssertionError):
    """Copies of one parameter on several devices are not the same; the message says where."""


class LossMeter:
    """The mean per-sample loss of batches, and the first batch whose loss is not finite.

    :meth:`add` is asynchronous and keeps one number a device and batch; :meth:`read` is the
    synchronisation, with several processes of all of them: each adds its part of the same batches.
    ``total`` is the sum of the losses read so far. To go on from it, give that, the number of
    samples (on rank 0; on others 0) and of batches in it.
    """

    def __init__(self, total: float = 0.0, num_samples: int = 0, num_batches: int = 0) -> None:
        self._unread: list[list[nd.NDArray]] = []
        self.total, self._num_samples, self._num_batches = total, num_samples, num_batches

    def add(self, losses: Sequence[nd.NDArray]) -> None:
        """Take one batch's per-sample losses, one array a device: what ``train_batch`` returns."""
        self._unread.append([loss.sum() for loss in losses])
        self._num_samples += sum(loss.size for loss in losses)

    def read(self) -> float:
        """Wait for all batches added so far; their mean loss. Diverged if one is not finite."""
        sums = [sum(float(array.asscalar()) for array in of_batch) for of_batch in self._unread]
        num_samples = self._num_samples
        if cluster.size() > 1:
            *sums, num_samples = cluster.total([*sums, num_samples]).tolist()
        for batch_sum in sums:
            self._num_batches += 1
            if not math.isfinite(batch_sum):
                raise Diverged(f"the loss became {batch_sum} in batch {self._num_batches}")
            self.total += batch_sum
        self._unread.clear()
        return self.total / max(1, num_samples)


def check_finite(params: Sequence[nd.NDArray]) -> None:
    """Wait for one device's ``params``; raise Diverged unless every number in them is finite."""
    if not nd.multi_all_finite(*params, num_arrays=len(params)).asscalar():
        raise Diverged("the parameters became infinite or NaN in the update after the last batch")


def check_identical(copies: Sequence[nd.NDArray], name: str) -> None:
    """Wait for one parameter's ``copies``; raise ReplicasDiffer unless all have the same bits."""
    first = copies[0].asnumpy()
    for copy in copies[1:]:
        other = copy.asnumpy()
        if first.tobytes() != other.tobytes():
            furthest = np.abs(first.astype("float64") - other.astype("float64")).max()
            raise ReplicasDiffer(
                f"{name} differs between {copies[0].context} and {copy.context}, by up to "
                f"{furthest:.3g}"
            )


def accuracy(
    images: np.ndarray,
    labels: np.ndarray,
    device_params: Sequence[Sequence[nd.NDArray]],
    ctx: Sequence[mx.Context],
    model: Callable,
    batch_size: int = 256,
) -> float:
    """Share of ``images`` (n, ...) with the highest score at their label (n,), on all devices.

    Every batch is cut over ``ctx``; each image is counted once, whatever the sizes. Each device
    counts for itself, and the host reads the K counts once, at the end: that is the only wait. With
    several processes each takes its part of the same images, and all get the same result.
    """
    num_images = len(images)
    mine = partition.slices(num_images, cluster.size())[cluster.rank()]
    images, labels = images[mine], labels[mine]
    correct = [nd.zeros((1,), ctx=c) for c in ctx]
    for start in range(0, len(images), batch_size):
        batch = slice(start, start + batch_size)
        shards = split_and_load((images[batch], labels[batch]), list(ctx))
        for i, (X_shard, y_shard) in enumerate(shards):
            predicted = model(X_shard, device_params[i]).argmax(axis=1)
            correct[i] += (predicted == y_shard.astype("float32")).sum()
    counted = sum(float(count.asscalar()) for count in correct)
    return float(cluster.total(counted)) / num_images
