"""The update of a Trainer: each parameter once, on the root of its bucket.

A parameter with a row_sparse gradient is updated on every device instead, as by ``gluon.Trainer``:
a broadcast would send all its rows, and the gradient has few. Some optimizers must update all
parameters on one device (:func:`needs_one_root`).
"""

from __future__ import annotations

import copy
from typing import Any, Sequence

import mxnet as mx
from mxnet.optimizer import LARS, LBSGD, SGLD, Nadam, Optimizer, Updater

from gluonpar import optim
from gluonpar.checkpoint import optimizer_states
from gluonpar.collectives import Exchange
from gluonpar.replicas import Copies, ParamBucket
from gluonpar.runtime import private_fields


def needs_one_root(optimizer: Optimizer) -> bool:
    """Return whether all parameters must be updated on the same device, and each one only once.

    LARS compares the parameters that it updates together. Nadam, SGLD and LBSGD change or draw
    numbers that the optimizer keeps, and so may optimizers that are not MXNet's.
    """
    is_of_mxnet = optimizer_states.is_of_mxnet(optimizer)
    return not is_of_mxnet or isinstance(optimizer, (LARS, LBSGD, Nadam, SGLD))


def check_draws_nothing(optimizer: Any, num_processes: int) -> None:
    """Raise ValueError for an optimizer that would update differently on each of the ranks."""
    if isinstance(optimizer, SGLD) and num_processes > 1:
        raise ValueError(
            "SGLD draws other random numbers on each rank: use another optimizer in a job of "
            "several processes"
        )


class ShardedUpdate:
    """The updates of parameters by one optimizer, sharded over the devices of an exchange.

    Each parameter is updated once instead of K times, and there is one optimizer state whatever K
    is (Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training",
    2020). All devices share the optimizer's update counts and states.
    """

    def __init__(self, updater: Updater, exchange: Exchange) -> None:
        self._updater, self._optimizer, self._exchange = updater, updater.optimizer, exchange
        self._roots: dict[int, int] = {}  # by parameter: the device that updated it last
        counts = private_fields.update_counts_by_device(self._optimizer)
        for c in exchange.ctx:
            counts[c.device_id] = counts[0]
        self._updater.states_synced = dict.fromkeys(self._updater.states, False)
        # For updates on every device: an Updater for each of the others, and by parameter the
        # state that these have copies of.
        self._other_updaters = [Updater(self._optimizer) for _ in exchange.ctx[1:]]
        self._copied_states: dict[int, Any] = {}

    def apply(self, buckets: Sequence[ParamBucket], fused: bool) -> None:
        """Update every bucket on its root, or on every device, and broadcast from the roots.

        With ``fused`` (:func:`optim.may_fuse`) buckets with a root are updated in one pass over
        memory, which in one process also sums their gradients.
        """
        on_all = [bucket for bucket in buckets if bucket.root is None]
        on_root = [bucket for bucket in buckets if bucket.root is not None]
        for bucket in buckets:
            for i, *_ in bucket.copies:
                root = bucket.root or 0
                if self._roots.setdefault(i, root) != root:
                    self._roots[i] = root
                    self._updater.states_synced[i] = False  # the state is on another device
        if self._updater.aggregate_updates:  # MXNet counts those first that it updates together
            indices = [each.index for bucket in buckets for each in bucket.copies]
            private_fields.begin_step(self._optimizer, indices)
        self._update(on_all if fused else buckets)
        if fused:
            self._update_in_one_pass(on_root)
        else:
            self._exchange.inside.broadcast([bucket.params for bucket in on_root])

    def _update(self, buckets: Sequence[ParamBucket]) -> None:
        """Update in the order of the parameters, on which some optimizers rely."""
        updates = sorted(
            ((copies, bucket.root) for bucket in buckets for copies in bucket.copies),
            key=lambda update: update[0].index,
        )
        aggregates = self._updater.aggregate_updates  # several parameters in one operator
        if aggregates:
            self._optimizer.aggregate_num = min(self._optimizer.aggregate_num, optim.MOST_WEIGHTS)
        groups: dict[tuple, list[Copies]] = {}
        for copies, root in updates:
            alone = root is None or not aggregates
            groups.setdefault((root, copies.index if alone else None), []).append(copies)
        for (root, _), group in groups.items():
            if root is None:
                self._update_on_all(*group)
            else:
                self._update_on(root, self._updater, group)

    @staticmethod
    def _update_on(device: int, updater: Updater, group: Sequence[Copies]) -> None:
        grads = [each.grads[device] for each in group]
        params = [each.params[device] for each in group]
        updater([each.index for each in group], grads, params)

    def _update_on_all(self, copies: Copies) -> None:
        """Update one parameter on every device, the first one last."""
        optimizer, states, i = self._optimizer, self._updater.states, copies.index
        counts = private_fields.update_counts(optimizer)
        is_copied = self._copied_states.get(i) is states.get(i)
        for k, updater in enumerate(self._other_updaters, 1):
            if not is_copied:  # the state was loaded, or is on other contexts now
                updater.states.pop(i, None)
                if i in states:
                    updater.states[i] = copy.deepcopy(states[i])
                    updater.states_synced[i] = False
            before = counts.get(i, optimizer.begin_num_update)
            self._update_on(k, updater, [copies])
            counts[i] = before  # a step counts once, however many devices there are
        self._update_on(0, self._updater, [copies])
        self._copied_states[i] = states[i]

    def _update_in_one_pass(self, buckets: Sequence[ParamBucket]) -> None:
        """Update all copies by SGD, with the bits of MXNet's operators."""
        sgd, indices = self._optimizer, [each.index for b in buckets for each in b.copies]
        rates = private_fields.count_updates(sgd, indices)

        def rule_of(copies: Copies) -> tuple:
            lr, wd = rates[copies.index]
            rule = optim.rule(lr, sgd.rescale_grad, wd, sgd.momentum, sgd.clip_gradient or 0)
            return rule, [self._momentum(copies)] if sgd.momentum else []

        optim.reduce_update(self._exchange, buckets, rule_of)

    def _momentum(self, copies: Copies) -> mx.nd.NDArray:
        """Return the parameter's momentum, on its root."""
        i, updater = copies.index, self._updater
        param = copies.params[self._roots[i]].as_nd_ndarray()
        if updater.states.get(i) is None:
            updater.states[i] = self._optimizer.create_state(i, param)
        elif not updater.states_synced[i]:
            updater.states[i] = updater.sync_state_context(updater.states[i], param.context)
        updater.states_synced[i] = True
        return updater.states[i]
