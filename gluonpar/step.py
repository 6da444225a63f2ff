"""train_batch: one step on all devices. The only place that composes the parts."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from gluonpar import cluster, replicas
from gluonpar.models.lenet import lenet
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.runtime import cached_op
from gluonpar.runtime.devices import as_list
from gluonpar.sharding import num_samples, split_and_load
from gluonpar.update import allreduce_sgd


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
    """One step of minibatch SGD over all devices, in place on ``device_params``; the losses.

    ``X`` (n, ...) and ``y`` (n,) are the whole batch, NumPy or MXNet; ``device_params[i]`` the
    parameters on ``ctx[i]`` (:func:`get_params`). ``model(X, params)`` gives predictions and
    ``loss(predictions, y)`` one loss a sample. The step equals one device's step on the whole batch
    up to rounding, however it is cut: gradients are summed over samples and devices, and only the
    update divides, by n. A device without samples adds zero. ``weights`` are the devices' relative
    speeds, to which the shards are proportional (:func:`split_and_load`).

    With several processes (:mod:`gluonpar.cluster`), each gives its own part of the batch, which
    may have no samples, and gradients are summed over all. They divide by the samples of all, whose
    number they tell each other; give it as ``batch_size``, if it is known, to save a message.

    Returns one array of per-sample losses for each device that had samples, on that device. Nothing
    waits: reading a loss is the caller's synchronisation. ``train_batch`` in Dive into Deep
    Learning, 13.5.6.

    Raises ValueError for X and y of different lengths, an empty batch, ``lr`` not a positive finite
    number, parameters that are not on their context, and weights that are not one positive finite
    number a context; then nothing has changed.
    """
    contexts = as_list(ctx)
    check_lr(lr)
    replicas.check(device_params, contexts)
    several, here = cluster.size() > 1, num_samples((X, y))
    shards = split_and_load((X, y), contexts, weights=weights) if here or not several else []
    with autograd.record():
        losses = [
            cached_op.losses(model, loss, X_shard, y_shard, params)
            for (X_shard, y_shard), params in zip(shards, device_params)
        ]
    if losses:
        autograd.backward(losses)
    for params in device_params[len(losses) :]:
        replicas.zero_grads(params)  # else last step's gradient would be added again
    if batch_size is None:
        batch_size = cluster.Later(here) if several else here
    allreduce_sgd(device_params, lr, batch_size, algorithm)
    return losses


def check_lr(lr: float) -> None:
    """Raise ValueError unless the learning rate is a positive finite number."""
    if not 0 < lr <= np.finfo("float32").max:
        raise ValueError(f"lr={lr} is no learning rate; give a positive finite number, such as 0.2")
