"""Loss and accuracy, accumulated on the devices and read by the host here, nowhere else."""

from __future__ import annotations

import math
from typing import Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet import nd

from gluonpar.data import batches
from gluonpar.sharding import split_and_load


class Diverged(FloatingPointError):
    """The loss stopped being a finite number; the message names epoch, batch and learning rate."""


class ReplicasDiffer(AssertionError):
    """Copies of one parameter on several devices are not the same; the message says where."""


class LossMeter:
    """The mean per-sample loss of batches, and the first batch whose loss is not finite.

    :meth:`add` is asynchronous and keeps one number a device and batch; :meth:`read` is the
    synchronisation.
    """

    def __init__(self) -> None:
        self._unread: list[list[nd.NDArray]] = []
        self._sum, self._num_samples, self._num_batches = 0.0, 0, 0

    def add(self, losses: Sequence[nd.NDArray]) -> None:
        """Take one batch's per-sample losses, one array a device: what ``train_batch`` returns."""
        self._unread.append([loss.sum() for loss in losses])
        self._num_samples += sum(loss.size for loss in losses)

    def read(self) -> float:
        """Wait for all batches added so far; their mean loss. Diverged if one is not finite."""
        for sums in self._unread:
            self._num_batches += 1
            batch_sum = sum(float(array.asscalar()) for array in sums)
            if not math.isfinite(batch_sum):
                raise Diverged(f"the loss became {batch_sum} in batch {self._num_batches}")
            self._sum += batch_sum
        self._unread.clear()
        return self._sum / max(1, self._num_samples)


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
    counts for itself, and the host reads the K counts once, at the end: that is the only wait.
    """
    correct = [nd.zeros((1,), ctx=c) for c in ctx]
    for X, y in batches(images, labels, batch_size):
        shards = split_and_load((X, y), list(ctx))
        for i, (X_shard, y_shard) in enumerate(shards):
            predicted = model(X_shard, device_params[i]).argmax(axis=1)
            correct[i] += (predicted == y_shard.astype("float32")).sum()
    return sum(float(count.asscalar()) for count in correct) / len(images)
