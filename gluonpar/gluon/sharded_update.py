"""The update of a Trainer: each parameter once, on the root of its bucket.

A parameter with a row_sparse gradient is updated on every device instead, as by ``gluon.Trainer``:
to broadcast it would send all its rows, of which the gradient has few. All buckets have one root
if the optimizer is not one of MXNet's: it may have arrays besides its states.
"""

from __future__ import annotations

import copy
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluonpar import optim
from gluonpar.collectives.exchange import Exchange
from gluonpar.gluon.updater import Updater, may_keep_arrays
from gluonpar.replicas import Copies, ParamBucket
from gluonpar.runtime import private_fields


class ShardedUpdate:
    """The updates of ``params`` by one optimizer, sharded over devices.

    Each parameter is updated once instead of K times, and there is one optimizer state whatever K
    is (Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training",
    2020).
    """

    def __init__(self, updater: Updater, params: Sequence[gluon.Parameter]) -> None:
        self._updater, self._params = updater, params
        self._optimizer = updater.optimizer
        self._roots: dict[int, int] = {}  # by parameter: the device that updated it last
        self._of_copies: list[Updater] = []  # by device: row_sparse gradients only
        self._copied: dict[int, Any] = {}  # by parameter: the state that _of_copies have, too

    def set_contexts(self, ctx: Sequence[mx.Context]) -> None:
        """Let all devices share the optimizer's update counts and states."""
        counts = private_fields.update_counts_by_device(self._optimizer)
        for c in ctx:
            counts[c.device_id] = counts[0]
        self._updater.states_synced = dict.fromkeys(self._updater.states, False)
        self._of_copies = [Updater(self._optimizer) for _ in ctx]
        self._copied.clear()

    def weights_were_set(self) -> None:
        """Compare, in the next update, each weight with its float32 copy, if it has one."""
        for updater in (self._updater, *self._of_copies):
            updater.weights_were_set()

    def with_roots(self, buckets: Sequence[ParamBucket]) -> Sequence[ParamBucket]:
        """Return the buckets, with one root if their updates may depend on each other.

        LARS compares what it updates together; others may have arrays of their own.
        """
        if type(self._optimizer) is mx.optimizer.LARS or may_keep_arrays(self._optimizer):
            return [bucket._replace(root=0) for bucket in buckets]
        return buckets

    def has_numpy_rule(self, buckets: Sequence[ParamBucket]) -> bool:
        """Return whether :meth:`apply` can sum while it updates: float32, plain SGD."""
        return type(self._optimizer) is mx.optimizer.SGD and all(
            bucket.row_sparse or bucket.copies[0].grads[0].dtype == np.float32 for bucket in buckets
        )

    def apply(self, exchange: Exchange, buckets: Sequence[ParamBucket], fused: bool) -> None:
        """Update every bucket on its root and broadcast the result.

        With ``fused`` the gradients, but for row_sparse ones, are summed here.
        """
        sparse = [bucket for bucket in buckets if bucket.row_sparse]
        dense = [bucket for bucket in buckets if not bucket.row_sparse]
        self._update_copies(sparse)
        for bucket in buckets:
            for i, *_ in bucket.copies:
                if self._roots.setdefault(i, bucket.root) != bucket.root:
                    self._roots[i] = bucket.root
                    self._updater.states_synced[i] = False  # the state is on another device
        self._update_on_roots(sparse if fused else buckets)
        for bucket in sparse:
            self._copied.update((i, self._updater.states[i]) for i, *_ in bucket.copies)
        if fused:
            self._sum_and_update(exchange, dense)
        else:
            exchange.inside.broadcast([bucket.params for bucket in dense])

    def _update_on_roots(self, buckets: Sequence[ParamBucket]) -> None:
        """In the order of the parameters, on which some optimizers rely."""
        roots = {each.index: bucket.root for bucket in buckets for each in bucket.copies}
        groups = [[i] for i in sorted(roots)]
        if self._updater.aggregate_updates:  # several parameters of one device in one operator
            self._optimizer.aggregate_num = min(self._optimizer.aggregate_num, optim.MOST_WEIGHTS)
            ks = sorted({*roots.values()})
            groups = [[i for i in sorted(roots) if roots[i] == k] for k in ks]
        for group in groups:
            grads = [private_fields.grads(self._params[i])[roots[i]] for i in group]
            values = [private_fields.values(self._params[i])[roots[i]] for i in group]
            self._updater(group, grads, values)

    def _update_copies(self, buckets: Sequence[ParamBucket]) -> None:
        """Update what devices other than the root hold of parameters with row_sparse gradients."""
        counts, states = private_fields.update_counts(self._optimizer), self._updater.states
        for bucket in buckets:
            [copies] = bucket.copies
            i, is_copied = copies.index, self._copied.get(copies.index) is states.get(copies.index)
            for k, (value, grad) in enumerate(zip(copies.params, copies.grads)):
                if k == bucket.root:
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

    def _sum_and_update(self, exchange: Exchange, buckets: Sequence[ParamBucket]) -> None:
        """Sum over devices, SGD and broadcast, in one pass over memory."""
        sgd, indices = self._optimizer, [each.index for b in buckets for each in b.copies]
        rates = private_fields.count_updates(sgd, indices)
        roots = {each.index: bucket.root for bucket in buckets for each in bucket.copies}

        def rule_of(copies: Copies) -> tuple:
            (lr, wd), clip = rates[copies.index], sgd.clip_gradient or 0
            rule = optim.rule(lr, sgd.rescale_grad, wd, sgd.momentum, clip)
            return rule, self._momentum(copies.index, roots[copies.index])

        optim.reduce_update(exchange, buckets, rule_of)

    def _momentum(self, i: int, root: int) -> list[mx.nd.NDArray]:
        """The state of parameter i as the optimizer creates it: none, or one array."""
        state = self._updater.prepare(i, private_fields.values(self._params[i])[root])
        return [] if state is None else [state]
