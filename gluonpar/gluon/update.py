"""The buckets of a Trainer's parameters, and the update: each one once, on its bucket's root.

A parameter with a row_sparse gradient is updated on every device instead, as by ``gluon.Trainer``:
a broadcast would send all its rows, and the gradient has few. Some optimizers must update all
parameters on one device (:func:`needs_one_root`).

MXNet's Updater applies an optimizer and holds its states. Three of its faults are corrected here:

- MXNet creates no momentum while that option is 0, and SGD and LARS leave an existing one as it was
  in a step with momentum 0, though ``m = momentum * m - lr * grad`` is ``-lr * grad`` then.
- With ``multi_precision`` an update begins with a float32 copy of the weights, and so it overwrites
  weights that ``set_data`` has set since.
- LBSGD adds up gradients without copying the first, which the next backward overwrites.
"""

from __future__ import annotations

import collections.abc
import copy
from typing import Any, Collection, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon, nd
from mxnet.optimizer import LARS, LBSGD, NAG, SGD, SGLD, Nadam, Optimizer, Signum, ccSGD

from gluonpar import cluster, gradients, optim, replicas
from gluonpar.checkpoint import optimizer_states
from gluonpar.collectives import Exchange
from gluonpar.plans import partition
from gluonpar.replicas import Copies, ParamBucket
from gluonpar.runtime import devices, memory, private_fields


def listed(params: Any) -> list[gluon.Parameter]:
    """Return the Parameters in a list or dict; gluon.Trainer refuses other entries."""
    values = params.values() if hasattr(params, "values") else params
    if not isinstance(values, collections.abc.Iterable):
        return []
    return [param for param in values if isinstance(param, gluon.Parameter)]


def check(params: Any) -> None:
    """Raise ValueError unless ``params``, at least one, are dense, and on the same contexts.

    No parameter and no context may occur twice. Gradients may be row_sparse.
    """
    if isinstance(params, collections.abc.Iterable) and not [*params]:
        raise ValueError(
            "params must have at least one Parameter, got none; pass net.collect_params() of a "
            "network with layers that have parameters"
        )
    values = listed(params)
    for i, param in enumerate(values):
        if param in values[:i]:
            raise ValueError(f"parameter {param.name} is given more than once; give it once")
        stype, grad_stype = private_fields.stype(param), private_fields.grad_stype(param)
        if stype != "default" or grad_stype not in ("default", "row_sparse"):
            raise ValueError(
                f"parameter {param.name} must be dense, with a dense or row_sparse gradient, got "
                f"{stype} with a {grad_stype} gradient"
            )
        devices.check_distinct(param.list_ctx())


# Optimizers that create a momentum for each parameter unless it is 0.
_WITH_MOMENTUM = (SGD, NAG, LARS, LBSGD, Signum)


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


class Layout:
    """Which parameters with a gradient are in which bucket, and which device is its root, if any.

    ``in_order`` are all of ``params`` in the order in which forward uses them: neighbours share a
    bucket. The buckets are summed by ``exchange``. With ``one_root`` device 0 is the root of all;
    otherwise buckets of row_sparse gradients have no root, and every device updates its copies.
    ``name`` is the Trainer's, which ranks compare. Arrays are looked up whenever they are needed,
    because the parameters may be given others.
    """

    def __init__(
        self,
        params: Sequence[gluon.Parameter],
        in_order: Sequence[gluon.Parameter],
        exchange: Exchange,
        one_root: bool,
        name: str,
    ) -> None:
        self._params, self._kinds = params, _kinds(params)
        self._ctx, self._num_processes, self._name = exchange.ctx, exchange.num_processes, name
        index = {param: i for i, param in enumerate(params)}
        self.params = [param for param in in_order if param.grad_req != "null"]
        self.trained = [*zip(self.params, gradients.track(self.params))]
        self._indices = [index[param] for param in self.params]
        buckets = replicas.neighbours([*map(_copies, self._indices, self.params)])
        sizes = [sum(memory.num_bytes(each.grads[0]) for each in bucket) for bucket in buckets]
        roots = partition.balance(sizes, 1 if one_root else len(self._ctx))
        self._buckets = []
        for bucket, root in zip(buckets, roots):
            indices = [each.index for each in bucket]
            on_all = bucket[0].grads[0].stype == "row_sparse" and not one_root
            self._buckets.append((indices, None if on_all else root))

    def is_current(self) -> bool:
        """Return whether the parameters still are of the same kinds, on the same contexts."""
        return _kinds(self._params) == self._kinds

    def buckets(
        self,
        ignore_stale_grad: bool,
        summed: bool = False,
        by_program: bool = False,
        facts: dict[str, Any] | None = None,
    ) -> list[ParamBucket]:
        """Return the buckets, without parameters that backward reached on no device of any rank.

        With ``summed`` the gradients are sums, which the program has made if ``by_program``.
        Otherwise all ranks must call this before each sum; they compare ``facts``.
        Unless ``ignore_stale_grad``, raises UserWarning if a parameter has no new gradient on any
        device of any rank.
        """
        if summed:
            written = [grads.counting() for _, grads in self.trained]
            on_some_rank = [*map(any, written)]
            if by_program and self._num_processes > 1:  # a rank without samples has sums, too
                on_some_rank = [True] * len(written)
                if ignore_stale_grad:  # this waits
                    on_some_rank = (cluster.total([*map(any, written)]) > 0).tolist()
        else:
            how = self._num_processes, self._name, facts
            of_params = [grads for _, grads in self.trained]
            written, on_some_rank = gradients.summands(of_params, *how)
        counting = dict(zip(self._indices, written))
        used = {i for i, is_used in zip(counting, on_some_rank) if is_used}
        if not ignore_stale_grad:
            self._check_not_stale(used)
        filled = []
        for indices, root in self._buckets:
            copies = [_copies(i, self._params[i], counting[i]) for i in indices if i in used]
            if copies:
                filled.append(ParamBucket(copies, root))
        return filled

    def _check_not_stale(self, used: Collection[int]) -> None:
        """Check that every parameter has a new gradient."""
        if self._indices and not used:
            raise UserWarning(
                "no gradient has been computed since the last update; call backward before step"
            )
        stale = [self._params[i].name for i in self._indices if i not in used]
        if stale:
            raise UserWarning(
                f"backward has not computed a gradient of parameter {stale[0]} on any device since "
                "the last update: the model did not use it. If that is intended, call "
                "step(batch_size, ignore_stale_grad=True)"
            )


def _copies(index: int, param: gluon.Parameter, *counts: list[bool]) -> Copies:
    return Copies(index, private_fields.values(param), private_fields.grads(param), *counts)


def _kinds(params: Sequence[gluon.Parameter]) -> list[tuple]:
    return [(param, param.grad_req, param.dtype, param.list_ctx()) for param in params]


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
        # Of the devices but the first, for updates on every device.
        self._other_updaters = [Updater(self._optimizer) for _ in exchange.ctx[1:]]

    def weights_were_set(self) -> None:
        """Compare, in the next update, each weight with its float32 copy, if it has one."""
        for updater in (self._updater, *self._other_updaters):
            updater.compared.clear()

    def may_fuse(self, buckets: Sequence[ParamBucket]) -> bool:
        """Return whether one pass over memory has the bits of MXNet's update: SGD, of float32."""
        dtypes = {bucket.copies[0].grads[0].dtype for bucket in buckets if bucket.root is not None}
        is_sgd = type(self._optimizer) is SGD
        return self._exchange.may_fuse and is_sgd and dtypes <= {np.float32}

    def apply(self, buckets: Sequence[ParamBucket], fused: bool) -> None:
        """Update every bucket on its root, or on every device, and broadcast from the roots.

        With ``fused`` (:meth:`may_fuse`) buckets with a root are updated in one pass over
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
        first, i = self._updater, copies.index
        counts = private_fields.update_counts(self._optimizer)
        before = counts.get(i, self._optimizer.begin_num_update)
        for k, updater in enumerate(self._other_updaters, 1):
            if not first.states_synced.get(i):  # a state was loaded, or is on other contexts now
                updater.states.pop(i, None)
                if i in first.states:
                    updater.states[i] = copy.deepcopy(first.states[i])
                    updater.states_synced[i] = False
            self._update_on(k, updater, [copies])
            counts[i] = before  # a step counts once, however many devices there are
        self._update_on(0, first, [copies])

    def _update_in_one_pass(self, buckets: Sequence[ParamBucket]) -> None:
        """Update all copies by SGD, with the bits of MXNet's operators."""
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
        self.compared: set[int] = set()  # parameters that are their float32 copies, rounded
        # Besides the states: LBSGD has arrays of its own, and optimizers not of MXNet may.
        is_of_mxnet = optimizer_states.is_of_mxnet(optimizer)
        self._may_keep_arrays = not is_of_mxnet or isinstance(optimizer, LBSGD)

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
            self.compared.add(i)
        elif not self.states_synced[i]:
            state = self.sync_state_context(state, weight.context)
            self.compared.discard(i)  # it may have been loaded
        if isinstance(optimizer, _WITH_MOMENTUM) and optimizer.momentum and _lacks(state):
            new = optimizer.create_state_multi_precision(i, weight.as_nd_ndarray())
            state = _filled(state, new)
        self.states[i], self.states_synced[i] = state, True
        if i not in self.compared:
            self.compared.add(i)
            self._renew_copy(state, weight.as_nd_ndarray())
        return state

    def _renew_copy(self, state: Any, weight: mx.nd.NDArray) -> None:
        """Make float32 copies of the weights equal to them, where they do not round to them."""
        has_copy = isinstance(state, (tuple, list)) and self.optimizer.multi_precision
        if not has_copy or weight.dtype != np.float16:
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
