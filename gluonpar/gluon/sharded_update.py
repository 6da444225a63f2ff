"""The updates of a Trainer: each parameter once, on the device that owns its bucket."""

from __future__ import annotations

from typing import Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluonpar import optim
from gluonpar.cluster import hierarchical
from gluonpar.collectives import broadcast_many
from gluonpar.collectives.host import fused_update
from gluonpar.gluon.parameter_buckets import Bucket


class OwnedUpdates:
    """One optimizer's updates of ``params``, whichever device each is computed on."""

    def __init__(self, updater: mx.optimizer.Updater, params: Sequence[gluon.Parameter]) -> None:
        self._updater, self._params = updater, params
        self._optimizer, self._num_devices = updater.optimizer, 0

    def settle_on(self, ctx: Sequence[mx.Context]) -> None:
        """Which device updates a parameter must not matter: they share counters and states."""
        self._num_devices = len(ctx)
        counts = self._optimizer._all_index_update_counts
        for c in ctx:
            counts[c.device_id] = counts[0]
        self._updater.states_synced = dict.fromkeys(self._updater.states, False)

    def owned(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """The buckets, all with one owner if the optimizer looks at what it updates together."""
        if type(self._optimizer) is mx.optimizer.LARS:
            return [bucket._replace(owner=0) for bucket in buckets]
        return buckets

    def apply(self, buckets: Sequence[Bucket]) -> None:
        """Every bucket's owner updates it by its own gradients, and sends the result around.

        In the order of the parameters, because some optimizers count on it.
        """
        owners = {i: bucket.owner for bucket in buckets for i in bucket.indices}
        todo = [
            (i, self._params[i]._grad[owners[i]], self._params[i]._data[owners[i]])
            for i in sorted(owners)
        ]
        if self._updater.aggregate_updates:  # several of one device in one operator
            groups = [[t for t in todo if owners[t[0]] == k] for k in range(self._num_devices)]
        else:
            groups = [[t] for t in todo]
        for group in filter(None, groups):
            self._updater(*map(list, zip(*group)))
        for bucket in buckets:
            broadcast_many([list(copies) for copies in zip(*bucket.values)], bucket.owner)

    def fusable(self, buckets: Sequence[Bucket]) -> bool:
        """Whether sum and update can be one pass over the host's memory."""
        return (
            type(self._optimizer) is mx.optimizer.SGD
            and all(fused_update.possible(bucket.grads) for bucket in buckets)
            and all(bucket.grads[0].dtype == np.float32 for bucket in buckets)
        )

    def sum_and_apply(self, buckets: Sequence[Bucket]) -> None:
        """Sum over devices, SGD and broadcast of each bucket, in one pass over the memory."""
        for bucket in buckets:
            indices = list(bucket.indices)
            self._optimizer._update_count(indices)
            rates = zip(self._optimizer._get_lrs(indices), self._optimizer._get_wds(indices))
            rules = [self._rule(*rate) for rate in rates]
            states = [self._momentum(i, bucket.owner) for i in indices]
            grads = hierarchical.summed(bucket.grads, bucket.owner)
            fused_update.reduce_update([fused_update.Item(grads, bucket.values, rules, states)])

    def _rule(self, lr: float, wd: float) -> Callable[..., None]:
        of = self._optimizer
        return optim.rule(lr, of.rescale_grad, wd, of.momentum, of.clip_gradient)

    def _momentum(self, i: int, owner: int) -> list[mx.nd.NDArray]:
        """The state of parameter i, as the optimizer makes it: none, or one array."""
        if i not in self._updater.states:
            weight = self._params[i]._data[owner].as_nd_ndarray()
            state = self._optimizer.create_state_multi_precision(i, weight)
            self._updater.states[i], self._updater.states_synced[i] = state, True
        state = self._updater.states[i]
        return [] if state is None else [state]
