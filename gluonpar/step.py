"""train_batch: one data-parallel step; allreduce_grads: its exchange, for loops by hand."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from gluonpar import cluster, gradients, optim, replicas, sharding
from gluonpar.collectives import Exchange
from gluonpar.models import lenet, softmax_cross_entropy
from gluonpar.replicas import ParamBucket
from gluonpar.runtime import cached_op, devices, heap, interrupts, memory, tape


def train_batch(
    X: Any,
    y: Any,
    device_params: Sequence[Sequence[mx.nd.NDArray]],
    ctx: mx.Context | Sequence[mx.Context],
    lr: float,
    model: Callable = lenet.lenet,
    loss: Callable = softmax_cross_entropy,
    algorithm: str | None = None,
    weights: Sequence[float] | None = None,
    batch_size: float | None = None,
) -> list[mx.nd.NDArray]:
    """Take one step of minibatch SGD on all devices, in place on ``device_params``.

    ``X`` (n, ...) and ``y`` (n,) are the whole batch, NumPy or MXNet; ``device_params[i]`` are the
    parameters on ``ctx[i]`` (:func:`get_params`), whose gradients every backward overwrites
    (``grad_req='write'``). ``model(X, params)`` returns predictions, as one graph if it is
    :func:`traceable`, and ``loss(predictions, y)`` one loss per sample. The step equals one
    device's step on the whole batch up to rounding, however it is split: only the update divides,
    by n. ``algorithm`` names the all-reduce (None: chosen, see :func:`allreduce`), and ``weights``
    are the devices' relative speeds (:func:`split_and_load`).

    With several processes (:mod:`gluonpar.cluster`), each passes its own part of the batch, which
    may be empty. ``batch_size`` is then the total number of samples; if it is None, the processes
    exchange their numbers.

    Returns one array of per-sample losses for each device that had samples, on that device. Nothing
    waits, except that processes that exchange their numbers of samples wait for the total before
    the update if they have GPUs or name an ``algorithm``. From ``train_batch`` in Dive into Deep
    Learning, 13.5.6.
    Raises ValueError, with nothing changed, for X and y of different lengths, an empty batch, a bad
    ``lr`` or ``batch_size``, parameters that are not on their context, bad weights, and gradients
    to which backward adds.
    """
    contexts = devices.as_list(ctx)
    optim.check_lr(lr)
    replicas.check(device_params, contexts)
    exchange = Exchange(contexts, algorithm)
    if batch_size is not None:
        batch_size = optim.check_batch_size(batch_size)
    of_params = gradients.of(device_params)
    if any(record.adds() for record in of_params.records):
        raise ValueError(
            "device_params must have gradients that backward overwrites (grad_req='write'), got "
            "some to which it adds; call allreduce_grads and sgd instead"
        )
    facts = {"lr": lr, "algorithm": algorithm, "batch_size": batch_size}
    cluster.check_equal_async(facts, **of_params.compared())

    # Split: shard i of the batch goes to device i.
    shards, num_samples = sharding.split((X, y), contexts, weights=weights)
    # Unless the total is given, the ranks exchange their numbers while the devices compute.
    with cluster.local() if batch_size else contextlib.nullcontext():
        of_ranks = cluster.PendingGather(batch_size or num_samples, "samples")
    if not num_samples and not sum(of_ranks.wait()):
        raise ValueError("X must hold at least 1 sample on one of the ranks, got 0 on all")

    # Forward: every device computes the losses of its shard.
    with autograd.record():
        losses = [
            cached_op.losses(model, loss, X_shard, y_shard, params, replicas.BUCKET_BYTES)
            for (X_shard, y_shard), params in zip(shards, device_params)
        ]

    # Backward: every device computes the gradients of its shard.
    with tape.one_recording() as recording:
        if losses:
            autograd.backward(losses)

    # All-reduce and update, of all copies. Gradients that were not written now do not count.
    counting = of_params.written_in(recording)
    trained = replicas.trained(device_params)  # a graph may have made others
    buckets = replicas.buckets(trained, counting)
    heap.end_step([copies.grads for bucket in buckets for copies in bucket.copies])
    with interrupts.held():
        allreduce_sgd(exchange, buckets, lr, of_ranks)
        gradients.mark_used(of_params.records)
    return losses


def allreduce_grads(device_params: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    """Replace the gradients of every parameter by their sum over all devices, in place.

    ``device_params[i]`` are the parameters on one device (:func:`get_params`, or the arrays of a
    Gluon network). The arrays at one index are copies of each other: of one shape and dtype, with
    gradients on all devices or on none. Gradients may be row_sparse. In a job of several processes
    the sum is over the devices of all of them, and all must call this. In its first call for these
    parameters ranks that have other values are an error, raised later, that names one.

    A gradient that backward has not written since the last call counts as zero: with fewer samples
    than devices some devices run no backward, and still have the sum of the batch before. Of a
    batch that was left out nothing counts (:mod:`gluonpar.gradients.law`). For arrays that are
    neither a Gluon network's nor made by :func:`get_params` that is so from the first call on; in
    it everything counts that backward has written, as MXNet's flags say.

    With ``grad_req='add'`` the sums add up over calls, until the program sets the gradients to zero
    on all devices.

    The sums are made in buckets, and nothing waits, as in :func:`train_batch`. Raises ValueError
    for other parameters. From the loop over parameters in ``train_batch``, Dive into Deep Learning,
    13.5.6.

    >>> import mxnet as mx
    >>> device_params = [[mx.nd.zeros((1,), ctx=mx.cpu(i))] for i in range(2)]
    >>> for (w,) in device_params:
    ...     w.attach_grad()
    >>> for batch in ([1.0, 10.0], [5.0]):  # the second one is for one device
    ...     with mx.autograd.record():
    ...         losses = [w * x for (w,), x in zip(device_params, batch)]
    ...     mx.autograd.backward(losses)
    ...     allreduce_grads(device_params)
    ...     print([float(w.grad.asscalar()) for (w,) in device_params])
    [11.0, 11.0]
    [5.0, 5.0]
    """
    device_params = [each if isinstance(each, list) else [*each] for each in device_params]
    if not device_params or not device_params[0]:
        raise ValueError("device_params must have at least one parameter on one device, got none")
    contexts = [memory.context(params[0]) for params in device_params]
    trained = replicas.check(device_params, contexts, row_sparse=True)
    exchange, of_params = Exchange(contexts), gradients.of(device_params)
    size = exchange.num_processes
    of = of_params.records, size, "allreduce_grads"
    counting, on_some_rank = gradients.summands(*of, **of_params.compared())
    buckets = replicas.buckets(trained, of_params.select(counting))
    heap.end_step([copies.grads for bucket in buckets for copies in bucket.copies])
    with interrupts.held():
        exchange.allreduce([bucket.grads for bucket in buckets])
        gradients.mark_exchanged(of_params.records, on_some_rank)


def allreduce_sgd(
    exchange: Exchange,
    buckets: Sequence[ParamBucket],
    lr: float,
    of_ranks: cluster.PendingGather,
) -> None:
    """Sum the gradients over all devices, and update all copies of the parameters by SGD.

    ``of_ranks`` are the ranks' numbers of samples, which may not be known yet.
    On CPU contexts the sum is part of the update, which then leaves the gradients as they are.
    """
    grads = [bucket.grads for bucket in buckets]
    if not exchange.may_fuse:
        exchange.allreduce(grads)
        optim.update_by_sgd(buckets, lr, sum(of_ranks.wait()))
        return

    def update(*arrays: np.ndarray) -> None:
        optim.rule(lr, 1.0 / sum(of_ranks.values))(*arrays)

    if exchange.num_processes > 1:
        exchange.reduce(grads)
    replicas.reduce_update(exchange, buckets, lambda copies: (update, []))
