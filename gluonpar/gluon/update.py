"""The update of a Trainer: each parameter once, on the root of its bucket.

A parameter with a row_sparse gradient is updated on every device instead, as by ``gluon.Trainer``:
a broadcast would send all its rows, and the gradient has few; unless the optimizer must update it
once (:func:`updates_once`). All buckets have one root if their updates may depend on each other
(:func:`needs_one_root`).

MXNet's Updater applies an optimizer and holds its states. Three of its faults are corrected here:

- MXNet creates no momentum while that option is 0, and SGD and LARS leave an existing one as it was
  in a step with momentum 0, though ``m = momentum * m - lr * grad`` is ``-lr * grad`` then.
- With ``multi_precision`` an update begins with a float32 copy of the weights, and so it overwrites
  weights that ``set_data`` has set since.
- LBSGD adds up gradients without copying the first, which the next backward overwrites.
"""

from __future__ import annotations

import copy
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.optimizer import LARS, LBSGD, NAG, SGD, SGLD, Nadam, Optimizer, Signum, ccSGD

from gluonpar import optim
from gluonpar.checkpoint import optimizer_states
from gluonpar.collectives import Exchange
from gluonpar.replicas import Copies, ParamBucket
from gluonpar.runtime import private_fields

# Optimizers that create a momentum for each parameter unless it is 0.
_WITH_MOMENTUM = (SGD, NAG, LARS, LBSGD, Signum)


def needs_one_root(optimizer: Optimizer) -> bool:
    """Return whether all parameters must be updated on the same device.

    LARS compares the parameters that it updates together; other classes may have arrays of their
    own.
    """
    return type(optimizer) is LARS or _may_keep_arrays(optimizer)


def updates_once(optimizer: Optimizer) -> bool:
    """Return whether a parameter must be updated on one device only.

    The update changes or draws numbers that the optimizer keeps, or may do so: updated one after
    the other, the copies would differ.
    """
    return isinstance(optimizer, (Nadam, SGLD)) or needs_one_root(optimizer)


def check_draws_nothing(optimizer: Any, num_processes: int) -> None:
    """Raise ValueError for an optimizer that would update differently on each of the ranks."""
    if isinstance(optimizer, SGLD) and num_processes > 1:
        raise ValueError(
            "SGLD draws other random numbers on each rank: use another optimizer in a job of "
            "several processes"
        )


def _may_keep_arrays(optimizer: Optimizer) -> bool:
    """Return whether it may have arrays of its own besides the states: all but MXNet's may."""
    return not optimizer_states.is_of_mxnet(optimizer) or isinstance(optimizer, LBSGD)


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

    def weights_were_set(self) -> None:
        """Compare, in the next update, each weight with its float32 copy, if it has one."""
        for updater in (self._updater, *self._other_updaters):
            updater.weights_were_set()

    def may_fuse(self, buckets: Sequence[ParamBucket]) -> bool:
        """Return whether one pass over memory can sum and update: on CPUs, float32, plain SGD."""
        return (
            self._exchange.may_fuse
            and type(self._optimizer) is SGD
            and all(b.root is None or b.copies[0].grads[0].dtype == np.float32 for b in buckets)
        )

    def apply(self, buckets: Sequence[ParamBucket], fused: bool) -> None:
        """Update every bucket on its root, or on every device, and broadcast from the roots.

        With ``fused`` the gradients in buckets with a root are summed here, in one process.
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
            self._sum_and_update(on_root)
        else:
            self._exchange.inside.broadcast([bucket.params for bucket in on_root])

    def _update(self, buckets: Sequence[ParamBucket]) -> None:
        """In the order of the parameters, on which some optimizers rely."""
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

    def _sum_and_update(self, buckets: Sequence[ParamBucket]) -> None:
        """Sum over devices in one process, SGD and broadcast, in one pass over memory."""
        sgd, indices = self._optimizer, [each.index for b in buckets for each in b.copies]
        rates = private_fields.count_updates(sgd, indices)

        def rule_of(copies: Copies) -> tuple:
            i, (lr, wd) = copies.index, rates[copies.index]
            momentum = self._updater.prepare(i, copies.params[self._roots[i]])
            rule = optim.rule(lr, sgd.rescale_grad, wd, sgd.momentum, sgd.clip_gradient or 0)
            return rule, [] if momentum is None else [momentum]

        optim.reduce_update(self._exchange, buckets, rule_of)


class Updater(mx.optimizer.Updater):
    """Updates weights of one device by their gradients."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._compared: set[int] = set()  # parameters that are their float32 copies, rounded
        self._may_keep_arrays = _may_keep_arrays(optimizer)

    def weights_were_set(self) -> None:
        """Renew, in the next update, the elements of float32 copies that are not the weights."""
        self._compared.clear()

    def __call__(self, index: Sequence[int], grad: Sequence, weight: Sequence) -> None:
        """Update each ``weight`` by its ``grad``, in place."""
        if self._may_keep_arrays:
            grad = [array.copy() for array in grad]
        momentum_is_0 = type(self.optimizer) in (SGD, ccSGD, LARS) and not self.optimizer.momentum
        stepped = []  # momenta that become the step, and the weights, or their float32 copies
        for i, g, w in zip(index, grad, weight):
            state = self.prepare(i, w)
            if momentum_is_0 and not _lacks(state) and g.stype == "default":
                pair = state if isinstance(state, (tuple, list)) else (state, w.as_nd_ndarray())
                stepped.append(pair)
        for momentum, value in stepped:
            value.copyto(momentum)
        super().__call__(index, grad, weight)
        for momentum, value in stepped:
            nd.elemwise_sub(value, momentum, out=momentum)

    def prepare(self, i: int, weight: mx.nd.NDArray) -> Any:
        """Return the state of parameter ``i``, complete and on the context of ``weight``."""
        optimizer, state = self.optimizer, self.states.get(i)
        if i not in self.states:
            state = optimizer.create_state_multi_precision(i, weight.as_nd_ndarray())
            self._compared.add(i)
        elif not self.states_synced[i]:
            state = self.sync_state_context(state, weight.context)
            self._compared.discard(i)  # it may have been loaded
        if isinstance(optimizer, _WITH_MOMENTUM) and optimizer.momentum and _lacks(state):
            new = optimizer.create_state_multi_precision(i, weight.as_nd_ndarray())
            state = _filled(state, new)
        self.states[i], self.states_synced[i] = state, True
        if i not in self._compared:
            self._compared.add(i)
            self._renew_copy(state, weight.as_nd_ndarray())
        return state

    def _renew_copy(self, state: Any, weight: mx.nd.NDArray) -> None:
        """Make float32 copies of the weights equal to them, where they do not round to them."""
        if not (isinstance(state, (tuple, list)) and self.optimizer.multi_precision):
            return
        if weight.dtype != np.float16:
            return
        create = type(self.optimizer).create_state_multi_precision
        if create is Optimizer.create_state_multi_precision:
            copy = state[0]
        elif create in [of.create_state_multi_precision for of in (SGD, NAG, LARS)]:
            copy = state[1]
        else:  # an optimizer whose states we do not know
            return
        rounds = copy.astype("float16") == weight
        copy[:] = nd.where(rounds, copy, weight.astype("float32"))


def _lacks(state: Any) -> bool:
    return state is None or isinstance(state, (tuple, list)) and any(x is None for x in state)


def _filled(state: Any, new: Any) -> Any:
    """Return ``state`` with the arrays of ``new`` where it is None."""
    if isinstance(state, (tuple, list)):
        return tuple(map(_filled, state, new))
    return new if state is None else state
