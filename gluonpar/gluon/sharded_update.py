"""The update of a Trainer: each parameter once, on the device that owns its bucket."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluonpar import optim
from gluonpar.collectives import broadcast_many
from gluonpar.replicas import Bucket
from gluonpar.step import GradientSums


class ShardedUpdate:
    """The updates of ``params`` by one optimizer, sharded over devices.

    A parameter is updated by the device that owns its bucket, which then broadcasts it: each is
    updated once instead of K times, and there is one optimizer state whatever K is (Xu et al.,
    "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", 2020).
    """

    def __init__(self, updater: mx.optimizer.Updater, params: Sequence[gluon.Parameter]) -> None:
        self._updater, self._params = updater, params
        self._optimizer, self._num_devices = updater.optimizer, 0

    def set_contexts(self, ctx: Sequence[mx.Context]) -> None:
        """Let all devices share the optimizer's update counts and states."""
        self._num_devices = len(ctx)
        counts = self._optimizer._all_index_update_counts
        for c in ctx:
            counts[c.device_id] = counts[0]
        self._updater.states_synced = dict.fromkeys(self._updater.states, False)

    def owned(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Return the buckets, with one owner if the optimizer compares what it updates together."""
        if type(self._optimizer) is mx.optimizer.LARS:
            return [bucket._replace(owner=0) for bucket in buckets]
        return buckets

    def has_numpy_rule(self, buckets: Sequence[Bucket]) -> bool:
        """Return whether :meth:`apply` can compute deferred sums: float32, plain SGD."""
        return type(self._optimizer) is mx.optimizer.SGD and all(
            bucket.grads[0].dtype == np.float32 for bucket in buckets
        )

    def apply(self, sums: GradientSums) -> None:
        """Update every bucket on its owner and broadcast the result."""
        if not sums.deferred:
            self._update_owned(sums.buckets)
        for bucket in sums.buckets:
            if sums.deferred:
                self._sum_and_update(bucket)
            else:
                broadcast_many([list(copies) for copies in zip(*bucket.params)], bucket.owner)

    def _update_owned(self, buckets: Sequence[Bucket]) -> None:
        """In the order of the parameters, on which some optimizers rely."""
        owners = {i: bucket.owner for bucket in buckets for i in bucket.indices}
        todo = [
            (i, self._params[i]._grad[owners[i]], self._params[i]._data[owners[i]])
            for i in sorted(owners)
        ]
        if self._updater.aggregate_updates:  # several parameters of one device in one operator
            groups = [[t for t in todo if owners[t[0]] == k] for k in range(self._num_devices)]
        else:
            groups = [[t] for t in todo]
        for group in filter(None, groups):
            self._updater(*map(list, zip(*group)))

    def _sum_and_update(self, bucket: Bucket) -> None:
        """Sum over devices, SGD and broadcast of a bucket, in one pass over memory."""
        indices = list(bucket.indices)
        self._optimizer._update_count(indices)
        rates = zip(self._optimizer._get_lrs(indices), self._optimizer._get_wds(indices))
        sgd = self._optimizer
        rules = [
            optim.rule(lr, sgd.rescale_grad, wd, sgd.momentum, sgd.clip_gradient)
            for lr, wd in rates
        ]
        states = [self._momentum(i, bucket.owner) for i in indices]
        optim.reduce_update([optim.Item(bucket.grads, bucket.params, rules, states)])

    def _momentum(self, i: int, owner: int) -> list[mx.nd.NDArray]:
        """The state of parameter i as the optimizer creates it: none, or one array."""
        if i not in self._updater.states:
            weight = self._params[i]._data[owner].as_nd_ndarray()
            state = self._optimizer.create_state_multi_precision(i, weight)
            self._updater.states[i], self._updater.states_synced[i] = state, True
        state = self._updater.states[i]
        return [] if state is None else [state]
