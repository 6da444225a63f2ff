"""train_batch: one data-parallel step, and how its all-reduce and update are carried out."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from gluonpar import cluster, optim, replicas, sharding
from gluonpar.collectives import check_algorithm, hierarchical
from gluonpar.models.lenet import lenet
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.replicas import Bucket
from gluonpar.runtime import backward_passes, cached_op, heap, interrupts, memory
from gluonpar.runtime.devices import as_list

# How many steps a training loop may queue ahead of the devices; their batches are in memory.
STEPS_IN_FLIGHT = 4


def train_batch(
    X: Any,
    y: Any,
    device_params: Sequence[Sequence[mx.nd.NDArray]],
    ctx: mx.Context | Sequence[mx.Context],
    lr: float,
    model: Callable = lenet,
    loss: Callable = softmax_cross_entropy,
    algorithm: str | None = None,
    weights: Sequence[float] | None = None,
    batch_size: int | None = None,
) -> list[mx.nd.NDArray]:
    """Take one step of minibatch SGD on all devices, in place on ``device_params``.

    ``X`` (n, ...) and ``y`` (n,) are the whole batch, NumPy or MXNet; ``device_params[i]`` are the
    parameters on ``ctx[i]`` (:func:`get_params`). ``model(X, params)`` returns predictions, as one
    graph if it is :func:`traceable`, and ``loss(predictions, y)`` one loss per sample. The step
    equals one device's step on the whole batch up to rounding, however it is split: only the update
    divides, by n. ``algorithm`` names the all-reduce (None: chosen, see :func:`allreduce`), and
    ``weights`` are the devices' relative speeds (:func:`split_and_load`).

    With several processes (:mod:`gluonpar.cluster`), each passes its own part of the batch, which
    may be empty; ``batch_size`` is the total number of samples, which they exchange if it is None.

    Returns one array of per-sample losses for each device that had samples, on that device. Nothing
    waits: reading a loss synchronises. From ``train_batch`` in Dive into Deep Learning, 13.5.6.
    Raises ValueError, with nothing changed, for X and y of different lengths, an empty batch, a bad
    ``lr`` or ``batch_size``, parameters that are not on their context, and bad weights.
    """
    contexts = as_list(ctx)
    check_lr(lr)
    replicas.check(device_params, contexts)
    if batch_size is not None:
        batch_size = sharding.check_batch_size(batch_size)

    if cluster.size() > 1:
        cluster.agree_later({"lr": lr, "algorithm": algorithm, "batch_size": batch_size})

    # Split: shard i of the batch goes to device i.
    shards, num_samples = sharding.split((X, y), contexts, weights=weights)
    if num_samples == 0 and cluster.size() == 1:
        raise ValueError("a batch must have at least 1 sample, got 0")
    if batch_size is None:  # Later: it is summed over processes before the gradients are
        batch_size = num_samples if cluster.size() == 1 else cluster.Later(num_samples)

    # Forward: every device computes the losses of its shard.
    for params in device_params:
        backward_passes.clear_flags(params)  # only what backward writes now will count
    with autograd.record():
        losses = [
            cached_op.losses(model, loss, X_shard, y_shard, params, replicas.BUCKET_BYTES)
            for (X_shard, y_shard), params in zip(shards, device_params)
        ]

    # Backward: every device computes the gradients of its shard.
    if losses:
        autograd.backward(losses)

    with autograd.pause():  # the caller may record; a step is not recorded
        # All-reduce: gradients are summed over devices, without those that are not of this batch.
        buckets = replicas.buckets(device_params, written=True)
        sums = allreduce_gradients(buckets, algorithm)

        # Update: every device updates its copy of the parameters.
        sgd(sums, lr, batch_size)
    return losses


def check_lr(lr: float) -> None:
    """Raise ValueError unless the learning rate is a positive finite number."""
    if not 0 < lr <= np.finfo("float32").max:
        raise ValueError(f"lr must be a positive finite number, got {lr}; try 0.2")


class GradientSums(NamedTuple):
    """Buckets whose gradients are sums or, if ``deferred``, are summed by the update."""

    buckets: Sequence[Bucket]
    deferred: bool


def allreduce_gradients(
    buckets: Sequence[Bucket],
    algorithm: str | None = None,
    compression: str | None = None,
    defer: bool = True,
    to_owner: bool = False,
) -> GradientSums:
    """Sum the gradients of every bucket over all devices of all processes.

    This is the only place that decides how. On CPU contexts, unless another algorithm than 'host'
    is named, the gradients compressed or ``defer`` is False, the sum is left to the update
    (:mod:`gluonpar.optim`). Otherwise every bucket is summed as soon as backward has computed it on
    all devices, in place on every device, or with ``to_owner`` on each bucket's owner only.
    Gradients that do not count are left out or, where an array is needed, set to zero.

    Raises ValueError, with nothing changed, for an unknown algorithm.
    """
    every = [copies for bucket in buckets for copies in bucket.copies]
    lists, owners = [copies.grads for copies in every], [b.owner for b in buckets for _ in b.copies]
    if lists:
        check_algorithm(algorithm, [*map(memory.context, lists[0])])
    heap.return_free(lists)
    by_host = algorithm in (None, "host") and compression is None
    deferred = defer and by_host and all(map(optim.on_host, lists))
    if deferred and cluster.size() == 1:
        return GradientSums([*map(_without_stale, buckets)], deferred)
    memory.zero([grad for copies in every for grad in copies.stale])
    if deferred or to_owner:
        hierarchical.reduce_many(lists, owners, algorithm, compression)
    else:
        hierarchical.allreduce_many(lists, algorithm, compression)
    return GradientSums([*map(_of_owner, buckets)] if deferred else buckets, deferred)


def _without_stale(bucket: Bucket) -> Bucket:
    """Leave out the gradients that do not count, and parameters that have no other."""
    found = []
    for copies in bucket.copies:
        if copies.stale:
            counting = [grad for grad, fresh in zip(copies.grads, copies.fresh) if fresh]
            copies = copies._replace(grads=counting)
        if copies.grads:
            found.append(copies)
    return bucket._replace(copies=found)


def _of_owner(bucket: Bucket) -> Bucket:
    """Leave only the owner's gradient, which is the sum."""
    found = [copies._replace(grads=[copies.grads[bucket.owner]]) for copies in bucket.copies]
    return bucket._replace(copies=found)


def sgd(sums: GradientSums, lr: float, batch_size: int | cluster.Later) -> None:
    """Update the parameters on all devices by :func:`gluonpar.sgd`, in place, bucket by bucket."""
    later = isinstance(batch_size, cluster.Later)

    def update(*arrays: np.ndarray) -> None:
        optim.rule(lr, 1.0 / (batch_size.number if later else batch_size))(*arrays)

    with interrupts.held():
        if sums.deferred:
            for bucket in sums.buckets:
                items = [optim.Item(each.grads, each.params, update) for each in bucket.copies]
                optim.reduce_update(items)
            return
        # MXNet's operators need the number itself.
        optim.update_by_sgd(sums.buckets, lr, batch_size.wait() if later else batch_size)
