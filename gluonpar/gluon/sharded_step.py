"""Step: which gradients a Trainer sums, on which device, and which device updates each parameter.

The parameters' gradients are summed in buckets of neighbours. Each bucket is summed onto one
device, its root, which updates the bucket's parameters and broadcasts them. So each parameter is
updated once instead of K times, and there is one optimizer state whatever K is (Xu et al.,
"Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", 2020).

A parameter with a row_sparse gradient is updated on every device instead, as by MXNet's Trainer: a
broadcast would send all its rows, and the gradient has few. Some optimizers must update all
parameters on one device (:func:`~gluonpar.gluon.update.needs_one_root`).
"""

from __future__ import annotations

import copy
import itertools
import operator
from typing import Any, Sequence

import numpy as np
from mxnet import gluon
from mxnet.optimizer import SGD

from gluonpar import gradients, metrics, optim, replicas
from gluonpar.collectives import Exchange
from gluonpar.gluon.update import Updater, needs_one_root
from gluonpar.plans import partition
from gluonpar.replicas import Copies, ParamBucket
from gluonpar.runtime import heap, interrupts, memory, private_fields


class Step:
    """Makes a Trainer's steps, while its parameters keep their kinds and contexts.

    ``in_order`` are all of ``params`` in the order in which forward uses them: neighbours share a
    bucket, of at most ``bucket_bytes`` (None: the default). The buckets are summed by ``exchange``.
    Ranks compare the Trainer's ``name``. Arrays are looked up whenever they are needed, because the
    parameters may be given others. All devices share the updater's counts and states.
    """

    def __init__(
        self,
        params: Sequence[gluon.Parameter],
        in_order: Sequence[gluon.Parameter],
        updater: Updater,
        exchange: Exchange,
        bucket_bytes: int | None,
        name: str,
    ) -> None:
        self._params, self._kinds = params, _kinds(params)
        self._updater, self._optimizer, self._exchange = updater, updater.optimizer, exchange
        self._name, self._all_grads = name, gradients.track(params)
        index = {param: i for i, param in enumerate(params)}
        self._indices = [index[param] for param in in_order if param.grad_req != "null"]
        self._grads = [self._all_grads[i] for i in self._indices]
        self._buckets = self._placed(bucket_bytes)
        self._roots: dict[int, int] = {}  # by parameter, the device that updated it last
        counts = private_fields.update_counts_by_device(self._optimizer)
        counts.update((c.device_id, counts[0]) for c in exchange.ctx)
        updater.states_synced = dict.fromkeys(updater.states, False)
        # For updates on every device; ``updater`` updates on the first.
        self._other_updaters = [Updater(self._optimizer) for _ in exchange.ctx[1:]]

    def _placed(self, bucket_bytes: int | None) -> list[tuple[list[int], int | None]]:
        """Return each bucket's indices, and its root, or None if every device updates."""
        of_buckets = replicas.neighbours([*map(self._copies, self._indices)], bucket_bytes)
        sizes = [sum(memory.num_bytes(each.grads[0]) for each in bucket) for bucket in of_buckets]
        one_root = needs_one_root(self._optimizer)
        roots = partition.balance(sizes, 1 if one_root else len(self._exchange.ctx))
        placed = []
        for bucket, root in zip(of_buckets, roots):
            on_all = bucket[0].grads[0].stype == "row_sparse" and not one_root
            placed.append(([each.index for each in bucket], None if on_all else root))
        return placed

    def _copies(self, i: int, counts: Sequence[bool] = ()) -> Copies:
        param = self._params[i]
        return Copies(i, private_fields.values(param), private_fields.grads(param), counts)

    def is_current(self) -> bool:
        """Return whether optimizer, kinds of parameters and contexts are still the same."""
        same_optimizer = self._updater.optimizer is self._optimizer
        return same_optimizer and _kinds(self._params) == self._kinds

    def parts(self, ignore_stale_grad: bool, **compared: Any) -> list[ParamBucket]:
        """Return the buckets to be summed, without parameters that no device of any rank used.

        All ranks must call this before each sum; what they compare are arguments of
        :func:`gluonpar.cluster.check_equal_async`. Raises UserWarning for a parameter without a new
        gradient, unless ``ignore_stale_grad``.
        """
        how = self._exchange.num_processes, self._name
        summands = gradients.summands(self._grads, *how, **compared)
        buckets = self._filled(*summands, ignore_stale_grad)
        heap.end_step([each.grads for bucket in buckets for each in bucket.copies])
        return buckets

    def sums(self, ignore_stale_grad: bool) -> list[ParamBucket]:
        """Return the buckets, to update all devices by the first one's gradients, which are sums.

        Raises as :meth:`parts` does.
        """
        how = self._exchange.num_processes, ignore_stale_grad
        buckets = self._filled(*gradients.summed(self._grads, *how), ignore_stale_grad)
        self._mark_summed(buckets)  # the program may have summed
        for bucket in buckets:
            if bucket.root is None:  # every device updates by its own gradients
                for first, *others in bucket.grads.lists:
                    for other in others:
                        first.copyto(other)
        return [b if b.root is None else b._replace(root=0) for b in buckets]

    def _filled(
        self, counting: Sequence[list[bool]], on_some_rank: Sequence[bool], ignore_stale_grad: bool
    ) -> list[ParamBucket]:
        used = dict(itertools.compress(zip(self._indices, counting), on_some_rank))
        stale = [self._params[i].name for i in self._indices if i not in used]
        if stale and not used and not ignore_stale_grad:
            raise UserWarning(
                "no gradient has been computed since the last update; call backward before step"
            )
        if stale and not ignore_stale_grad:
            raise UserWarning(
                f"backward has not computed a gradient of parameter {stale[0]} on any device since "
                "the last update: the model did not use it. If that is intended, call "
                "step(batch_size, ignore_stale_grad=True)"
            )
        of_buckets = [
            ParamBucket([self._copies(i, used[i]) for i in indices if i in used], root)
            for indices, root in self._buckets
        ]
        return [bucket for bucket in of_buckets if bucket.copies]

    @interrupts.held()
    def sum(self, buckets: Sequence[ParamBucket], on_all: bool = True) -> None:
        """Sum the gradients on all devices, or on each bucket's root."""
        exchange = self._exchange.allreduce if on_all else self._exchange.reduce
        exchange([bucket.grads for bucket in buckets])
        for bucket in buckets:
            self._mark_summed([bucket], 0 if on_all else bucket.root or 0)

    def _mark_summed(self, buckets: Sequence[ParamBucket], root: int = 0) -> None:
        """Note that gradients are sums. Passes that add will add to one device's sum only."""
        of_buckets = [self._all_grads[each.index] for b in buckets for each in b.copies]
        gradients.mark_summed(of_buckets, root)

    @interrupts.held()
    def sum_and_update(self, buckets: Sequence[ParamBucket]) -> None:
        """Sum and update, in one pass over memory where that has the bits of MXNet's update."""
        on_root = [bucket for bucket in buckets if bucket.root is not None]
        on_each = [bucket for bucket in buckets if bucket.root is None]
        has_sgd = type(self._optimizer) is SGD and self._exchange.may_fuse
        if not has_sgd or any(b.copies[0].grads[0].dtype != np.float32 for b in on_root):
            self.sum(buckets, on_all=False)
            self.update(buckets)
            return
        self.sum(buckets if self._exchange.num_processes > 1 else on_each, on_all=False)
        self._begin(buckets)
        self._update(on_each)
        self._update_in_one_pass(on_root)
        gradients.mark_used(self._all_grads)

    @interrupts.held()
    def update(self, buckets: Sequence[ParamBucket]) -> None:
        """Update by sums, on each bucket's root or on every device; broadcast from the roots."""
        self._begin(buckets)
        self._update(buckets)
        on_root = [bucket.params for bucket in buckets if bucket.root is not None]
        self._exchange.inside.broadcast(on_root)
        gradients.mark_used(self._all_grads)

    def _begin(self, buckets: Sequence[ParamBucket]) -> None:
        """Prepare states that change their device, and counts of updates."""
        for bucket in buckets:
            for i, *_ in bucket.copies:
                root = bucket.root or 0
                if self._roots.setdefault(i, root) != root:
                    self._roots[i] = root
                    self._updater.states_synced[i] = False  # the state is on another device
        if self._updater.aggregate_updates:  # MXNet counts those first that it updates together
            indices = [each.index for bucket in buckets for each in bucket.copies]
            private_fields.begin_step(self._optimizer, indices)

    def _update(self, buckets: Sequence[ParamBucket]) -> None:
        """Update in the order of the parameters, on which some optimizers rely."""
        aggregates = self._updater.aggregate_updates  # several parameters in one operator
        if aggregates:
            self._optimizer.aggregate_num = min(self._optimizer.aggregate_num, optim.MOST_WEIGHTS)
        groups: dict[tuple, list[Copies]] = {}
        updates = [(copies.index, root, copies) for of, root in buckets for copies in of]
        for i, root, copies in sorted(updates, key=operator.itemgetter(0)):
            alone = root is None or not aggregates
            groups.setdefault((root, i if alone else None), []).append(copies)
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
            if not first.states_synced.get(i):  # a state was loaded, or the contexts have changed
                updater.states.pop(i, None)
                if i in first.states:
                    updater.states[i] = copy.deepcopy(first.states[i])
                    updater.states_synced[i] = False
            self._update_on(k, updater, [copies])
            counts[i] = before  # a step counts once, however many devices there are
        self._update_on(0, first, [copies])

    def _update_in_one_pass(self, buckets: Sequence[ParamBucket]) -> None:
        """Sum the gradients and update all copies by SGD, with the bits of MXNet's operators."""
        sgd, indices = self._optimizer, [each.index for b in buckets for each in b.copies]
        rates = private_fields.count_updates(sgd, indices)
        if self._updater.note and indices:  # what MXNet's operators would be given
            lrs, wds = zip(*(rates[i] for i in indices))
            used = {"lrs": lrs, "wds": wds, "rescale_grad": sgd.rescale_grad}
            options = {"momentum": sgd.momentum, "clip_gradient": sgd.clip_gradient}
            used.update((name, value) for name, value in options.items() if value)
            self._updater.note(indices, [([*used], [*used.values()])])

        def rule_of(copies: Copies) -> tuple:
            i, (lr, wd) = copies.index, rates[copies.index]
            momentum = self._updater.prepare(i, copies.params[self._roots[i]])
            rule = optim.rule(lr, sgd.rescale_grad, wd, sgd.momentum, sgd.clip_gradient or 0)
            return rule, [] if momentum is None else [momentum]

        replicas.reduce_update(self._exchange, buckets, rule_of)


def _kinds(params: Sequence[gluon.Parameter]) -> list[tuple]:
    return [(param, param.grad_req, param.dtype, param.list_ctx()) for param in params]


def are_finite(buckets: Sequence[ParamBucket]) -> bool:
    """Return whether all elements of the gradients' sums are finite; wait for all of them."""
    each_finite = []
    for bucket in buckets:
        sums = [each.grads[bucket.root or 0] for each in bucket.copies]
        sums = [total.data if total.stype == "row_sparse" else total for total in sums]
        each_finite.append(metrics.all_finite(sums))
    return all(bool(finite.asscalar()) for finite in each_finite)
