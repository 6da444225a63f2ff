"""The sum over devices and the update after it."""

from __future__ import annotations

from typing import Callable, Sequence

import mxnet as mx

from gluonpar import cluster, optim, replicas
from gluonpar.cluster import hierarchical
from gluonpar.collectives import allreduce_many, checks, named
from gluonpar.collectives.host import fused_update


def allreduce_sgd(
    device_params: Sequence[Sequence[mx.nd.NDArray]],
    lr: float,
    batch_size: int | cluster.Later,
    algorithm: str | None = None,
) -> None:
    """Sum the gradients over devices, and update every device's copy as :func:`gluonpar.sgd`.

    With several processes, over the devices of all of them. ``batch_size`` samples are in that sum.
    It is done bucket by bucket, the last layers' first, each as soon as backward has computed it on
    all devices. On CPU contexts, unless another algorithm than 'host' is named, sum and update are
    one pass over the memory (:mod:`gluonpar.collectives.host.fused_update`), and the gradients stay each
    device's own; otherwise they become the sums. Raises ValueError for what :func:`allreduce` does
    not take.
    """
    buckets = [bucket for bucket in replicas.buckets(device_params) if bucket.grads[0].size]
    for bucket in buckets:
        checks.check_list(bucket.grads, "gradients")
    if algorithm is not None:
        named(algorithm)
    if algorithm in (None, "host") and all(
        fused_update.possible(bucket.grads) for bucket in buckets
    ):
        update = _rule(lr, batch_size)
        for bucket in buckets:
            grads, params = hierarchical.summed(bucket.grads), bucket.params
            fused_update.reduce_update(
                [fused_update.Item(grads, params, [update] * len(params[0]))]
            )
        return
    lists = [bucket.grads for bucket in buckets]
    allreduce_many(lists, algorithm)
    hierarchical.complete(lists, [0] * len(lists), everywhere=True)
    if isinstance(batch_size, cluster.Later):
        batch_size = batch_size.wait()  # MXNet's operators take a number that is known
    for params in device_params:
        optim.sgd(params, lr, batch_size)


def _rule(lr: float, batch_size: int | cluster.Later) -> Callable[..., None]:
    """SGD's rule; a number that comes later is there when the gradients' sum is."""
    if not isinstance(batch_size, cluster.Later):
        return optim.rule(lr, 1.0 / batch_size)
    return lambda *arrays: optim.rule(lr, 1.0 / batch_size.number)(*arrays)
