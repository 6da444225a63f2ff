"""The parameters of a Gluon network on all devices, with their gradients in flat buckets.

A Gluon ``Parameter`` holds a value and a gradient per context. Here the gradients become views of a
few flat arrays (:class:`gluonpar.replicas.Replica`), which is invisible to other code.
"""

from __future__ import annotations

import collections.abc
from typing import Collection, Sequence

from mxnet import autograd, gluon

from gluonpar import cluster
from gluonpar.collectives import partition
from gluonpar.replicas import Bucket, Replica
from gluonpar.runtime import memory
from gluonpar.runtime.devices import check_distinct


class Layout:
    """All parameters with a gradient, by index, in buckets.

    ``pinned`` ones keep their arrays, and so do those with a row_sparse gradient.
    ``in_order`` are the same parameters in the order in which forward uses them: neighbours share
    a bucket.
    """

    def __init__(
        self,
        params: Sequence[gluon.Parameter],
        pinned: Collection[gluon.Parameter] = (),
        in_order: Sequence[gluon.Parameter] | None = None,
    ) -> None:
        self.indices = [i for i, param in enumerate(params) if param.grad_req != "null"]
        self._params = [params[i] for i in self.indices]
        self.ctx = self._params[0].list_ctx() if self._params else []
        place = {param: i for i, param in enumerate(in_order or params)}
        in_turn = sorted(self.indices, key=lambda i: place[params[i]])
        alone = [i for i in self.indices if params[i] in pinned or _is_sparse(params[i])]
        self.buckets = self._flatten([i for i in in_turn if i not in alone], params)
        self.buckets += [_bucket_of_one(i, params[i], i % len(self.ctx)) for i in alone]
        self._made = _arrays(self._params)

    def holds(self, params: Sequence[gluon.Parameter]) -> bool:
        """Return whether ``params`` still have the arrays that were made here, and no others.

        They do not after a cast, with another ``grad_req``, or on other contexts.
        """
        arrays = _arrays([param for param in params if param.grad_req != "null"])
        return [*map(id, arrays)] == [*map(id, self._made)]

    def moved(self) -> list[gluon.Parameter]:
        """Return the parameters whose gradients autograd writes to other arrays than made here.

        A network hybridized with ``static_alloc`` and ``static_shape`` keeps writing to the arrays
        of its first backward. ``param.list_grad()`` is corrected to return them.
        """
        found = []
        for param in self._params:
            written = [memory.grad_chunk(value) for value in param._data]
            if written != [*map(memory.chunk, param._grad)]:
                param._grad[:] = [value.grad for value in param._data]
                found.append(param)
        return found

    def fresh(self) -> list[list[bool]]:
        """Return per parameter and device whether backward has written its gradient since used."""
        return [[value._fresh_grad for value in param._data] for param in self._params]

    def zero_stale(self) -> None:
        """Zero every gradient that is not fresh, so that the device adds nothing to the sum."""
        for param, on_devices in zip(self._params, self.fresh()):
            for grad, fresh in zip(param._grad, on_devices):
                if not fresh:
                    memory.zero(grad)

    def mark_used(self) -> None:
        """Mark all gradients as not fresh."""
        for param in self._params:
            for value in param._data:
                value._fresh_grad = False

    def set_grad_req(self, grad_req: str | None) -> None:
        """Make backward 'write' or 'add' for all parameters; None restores each one's own."""
        for param in self._params:
            for value, grad in zip(param._data, param._grad):
                fresh = value._fresh_grad
                autograd.mark_variables([value], [grad], grad_req or param.grad_req)
                value._fresh_grad = fresh

    def without(self, absent: set[int]) -> list[Bucket]:
        """Return the buckets with the parameters of these indices left out."""
        kept = []
        for bucket in self.buckets:
            if absent.isdisjoint(bucket.indices):
                kept.append(bucket)
                continue
            for i in sorted({*bucket.indices} - absent):
                param = self._params[self.indices.index(i)]
                kept.append(_bucket_of_one(i, param, bucket.owner))
        return kept

    def _flatten(self, indices: Sequence[int], params: Sequence[gluon.Parameter]) -> list[Bucket]:
        """Put the parameters' gradients into buckets, with their present values."""
        if not indices:
            return []
        chosen = [params[i] for i in indices]
        replicas = [_replica(chosen, device) for device in range(len(self.ctx))]
        owners = partition.balance([*map(memory.num_bytes, replicas[0].grads)], len(replicas))
        buckets = []
        for b, (members, owner) in enumerate(zip(replicas[0].members, owners)):
            values = [[replica[j] for j in members] for replica in replicas]
            grads = [replica.grads[b] for replica in replicas]
            buckets.append(Bucket([indices[j] for j in members], values, grads, owner))
        return buckets


def listed(params) -> list[gluon.Parameter]:
    """Return the Parameters in a list or dict; gluon.Trainer refuses what else may be in it."""
    values = params.values() if hasattr(params, "values") else params
    if not isinstance(values, collections.abc.Iterable):
        return []
    return [param for param in values if isinstance(param, gluon.Parameter)]


def check(params) -> None:
    """Raise ValueError unless ``params`` are dense, on the same contexts, and listed once each.

    No context may occur twice. Gradients may be row_sparse in one process.
    """
    values = listed(params)
    for i, param in enumerate(values):
        if param in values[:i]:
            raise ValueError(f"parameter {param.name} is given more than once; give it once")
        if param._stype != "default" or param._grad_stype not in ("default", "row_sparse"):
            raise ValueError(
                f"parameter {param.name} must be dense, with a dense or row_sparse gradient, got "
                f"{param._stype} with a {param._grad_stype} gradient"
            )
        if _is_sparse(param) and cluster.size() > 1:
            raise ValueError(
                f"parameter {param.name} must have a dense gradient, because row_sparse gradients "
                "are not exchanged between processes; make it with sparse_grad=False"
            )
        if param.list_ctx() != values[0].list_ctx():
            raise ValueError(
                f"all parameters must be on the same contexts, got {param.name} on "
                f"{param.list_ctx()} and {values[0].name} on {values[0].list_ctx()}"
            )
        check_distinct(param.list_ctx())


def _replica(params: Sequence[gluon.Parameter], device: int) -> Replica:
    """One device's arrays of ``params``; their gradients become views of flat arrays."""
    old = [(param._grad[device], param._data[device]._fresh_grad) for param in params]
    replica = Replica([param._data[device] for param in params])
    for param, value, (grad, fresh) in zip(params, replica, old):
        param._grad[device] = value.grad
        grad.copyto(param._grad[device])
        autograd.mark_variables([value], [param._grad[device]], param.grad_req)
        value._fresh_grad = fresh
    return replica


def _bucket_of_one(index: int, param: gluon.Parameter, owner: int) -> Bucket:
    owner = 0 if _is_sparse(param) else owner  # every device updates it
    return Bucket([index], [[value] for value in param._data], param._grad, owner)


def _is_sparse(param: gluon.Parameter) -> bool:
    return param._grad_stype == "row_sparse"


def _arrays(params: Sequence[gluon.Parameter]) -> list:
    """Each parameter followed by its values and gradients."""
    return [x for param in params for x in (param, *(param._data or ()), *(param._grad or ()))]
