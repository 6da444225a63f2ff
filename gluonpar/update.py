"""The sum over devices and the update after it."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx

from gluonpar import optim, replicas
from gluonpar.collectives import allreduce_many, checks, fused, named


def allreduce_sgd(
    device_params: Sequence[Sequence[mx.nd.NDArray]],
    lr: float,
    batch_size: int,
    algorithm: str | None = None,
) -> None:
    """Sum the gradients over devices, and update every device's copy as :func:`gluonpar.sgd`.

    ``batch_size`` samples are in that sum. It is done bucket by bucket, the last layers' first,
    each as soon as backward has computed it on all devices. On CPU contexts, unless another
    algorithm than 'host' is named, sum and update are one pass over the memory
    (:mod:`gluonpar.collectives.fused`), and the gradients stay each device's own; otherwise they
    become the sums. Raises ValueError for what :func:`allreduce` does not take.
    """
    buckets = [bucket for bucket in replicas.buckets(device_params) if bucket.grads[0].size]
    for bucket in buckets:
        checks.check_list(bucket.grads, "gradients")
    if algorithm is not None:
        named(algorithm)
    if algorithm in (None, "host") and all(fused.possible(bucket.grads) for bucket in buckets):
        update = optim.rule(lr, 1.0 / batch_size)
        for grads, params in ((bucket.grads, bucket.params) for bucket in buckets):
            fused.reduce_update([fused.Item(grads, params, [update] * len(params[0]))])
        return
    allreduce_many([bucket.grads for bucket in buckets], algorithm)
    for params in device_params:
        optim.sgd(params, lr, batch_size)
