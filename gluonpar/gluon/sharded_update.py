"""The update of a Trainer: each parameter once, on the device that owns its bucket.

A parameter with a row_sparse gradient is updated on every device instead, as by ``gluon.Trainer``:
to broadcast it would send all its rows, of which the gradient has few.
"""

from __future__ import annotations

import copy
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluonpar import optim
from gluonpar.collectives import broadcast_many
from gluonpar.replicas import Bucket
from gluonpar.step import GradientSums


class ShardedUpdate:
    """The updates of ``params`` by one optimizer, sharded over devices.

    Each parameter is updated once instead of K times, and there is one optimizer state whatever K
    is (Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training",
    2020).
    """

    def __init__(self, updater: mx.optimizer.Updater, params: Sequence[gluon.Parameter]) -> None:
        self._updater, self._params = updater, params
        self._optimizer = updater.optimizer
        self._owners: dict[int, int] = {}  # by parameter: the device that updated it last
        self._of_copies: list[mx.optimizer.Updater] = []  # by device: row_sparse gradients only
        self._copied: dict[int, Any] = {}  # by parameter: the state that _of_copies have, too

    def set_contexts(self, ctx: Sequence[mx.Context]) -> None:
        """Let all devices share the optimizer's update counts and states."""
        counts = self._optimizer._all_index_update_counts
        for c in ctx:
            counts[c.device_id] = counts[0]
        self._updater.states_synced = dict.fromkeys(self._updater.states, False)
        self._of_copies = [mx.optimizer.get_updater(self._optimizer) for _ in ctx]
        self._copied.clear()

    def owned(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Return the buckets, with one owner if the optimizer compares what it updates together."""
        if type(self._optimizer) is mx.optimizer.LARS:
            return [bucket._replace(owner=0) for bucket in buckets]
        return buckets

    def has_numpy_rule(self, buckets: Sequence[Bucket]) -> bool:
        """Return whether :meth:`apply` can compute deferred sums: float32, plain SGD."""
        return type(self._optimizer) is mx.optimizer.SGD and all(
            bucket.row_sparse or bucket.grads[0].dtype == np.float32 for bucket in buckets
        )

    def apply(self, sums: GradientSums) -> None:
        """Update every bucket on its owner and broadcast the result."""
        sparse = [bucket for bucket in sums.buckets if bucket.row_sparse]
        self._update_copies(sparse)
        for bucket in sums.buckets:
            for i in bucket.indices:
                if self._owners.setdefault(i, bucket.owner) != bucket.owner:
                    self._owners[i] = bucket.owner
                    self._updater.states_synced[i] = False  # the state is on another device
        self._update_owned(sparse if sums.deferred else sums.buckets)
        self._copied.update((i, self._updater.states[i]) for b in sparse for i in b.indices)
        for bucket in sums.buckets:
            if bucket.row_sparse:
                continue
            if sums.deferred:
                self._sum_and_update(bucket)
            else:
                broadcast_many([list(copies) for copies in zip(*bucket.params)], bucket.owner)

    def _update_owned(self, buckets: Sequence[Bucket]) -> None:
        """In the order of the parameters, on which some optimizers rely."""
        owners = {i: bucket.owner for bucket in buckets for i in bucket.indices}
        groups = [[i] for i in sorted(owners)]
        if self._updater.aggregate_updates:  # several parameters of one device in one operator
            self._optimizer.aggregate_num = min(self._optimizer.aggregate_num, optim.MOST_WEIGHTS)
            ks = sorted({*owners.values()})
            groups = [[i for i in sorted(owners) if owners[i] == k] for k in ks]
        for group in groups:
            grads = [self._params[i]._grad[owners[i]] for i in group]
            values = [self._params[i]._data[owners[i]] for i in group]
            self._updater(group, grads, values)

    def _update_copies(self, buckets: Sequence[Bucket]) -> None:
        """Update what devices other than the owner hold of parameters with row_sparse gradients."""
        counts, states = self._optimizer._index_update_count, self._updater.states
        for bucket in buckets:
            [i] = bucket.indices
            is_copied = self._copied.get(i) is states.get(i)
            for k, ([value], grad) in enumerate(zip(bucket.params, bucket.grads)):
                if k == bucket.owner:
                    continue
                updater = self._of_copies[k]
                if not is_copied:  # the state was loaded, or is on other contexts now
                    updater.states.pop(i, None)
                    if i in states:
                        updater.states[i] = copy.deepcopy(states[i])
                        updater.states_synced[i] = False
                before = counts.get(i, self._optimizer.begin_num_update)
                updater([i], [grad], [value])
                counts[i] = before  # a step counts once, however many devices there are

    def _sum_and_update(self, bucket: Bucket) -> None:
        """Sum over devices, SGD and broadcast of a bucket, in one pass over memory."""
        sgd, indices = self._optimizer, list(bucket.indices)
        sgd._update_count(indices)
        clip = sgd.clip_gradient or 0
        rates = zip(sgd._get_lrs(indices), sgd._get_wds(indices))
        rules = [optim.rule(lr, sgd.rescale_grad, wd, sgd.momentum, clip) for lr, wd in rates]
        states = [self._momentum(i, bucket.owner) for i in indices]
        optim.reduce_update([optim.Item(bucket.grads, bucket.params, rules, states)])

    def _momentum(self, i: int, owner: int) -> list[mx.nd.NDArray]:
        """The state of parameter i as the optimizer creates it: none, or one array."""
        states = self._updater.states
        if i not in states:
            weight = self._params[i]._data[owner].as_nd_ndarray()
            states[i] = self._optimizer.create_state_multi_precision(i, weight)
            self._updater.states_synced[i] = True
        return [] if states[i] is None else [states[i]]
