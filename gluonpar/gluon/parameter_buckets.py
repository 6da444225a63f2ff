"""The parameters of a Gluon network on all devices, in flat buckets: replicas for a Trainer.

A Gluon ``Parameter`` keeps a value and a gradient a context. Here the gradients become views of a
few flat arrays (:class:`gluonpar.replicas.Replica`), and stay ordinary arrays to everybody else.
Whoever gives a parameter other arrays later (a cast, another ``grad_req``, other contexts) makes
them be laid out anew.
"""

from __future__ import annotations

import operator
from typing import Collection, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd, gluon

from gluonpar.collectives import partition
from gluonpar.replicas import Replica
from gluonpar.runtime import memory


class Bucket(NamedTuple):
    """Parameters whose gradients are summed as one: their numbers, and per device what they hold.

    ``values[k]`` are device k's; ``grads[k]`` is one array, their gradients end to end. ``owner``
    is the device that updates them if only one does.
    """

    indices: Sequence[int]
    values: Sequence[Sequence[mx.nd.NDArray]]
    grads: Sequence[mx.nd.NDArray]
    owner: int


class Layout:
    """All parameters with a gradient, by number, laid out in buckets on their contexts.

    Those that are ``pinned`` keep their own arrays (see :meth:`moved`).
    """

    def __init__(
        self, params: Sequence[gluon.Parameter], pinned: Collection[gluon.Parameter] = ()
    ) -> None:
        self.numbers = [i for i, param in enumerate(params) if param.grad_req != "null"]
        self._params = [params[i] for i in self.numbers]
        self.ctx = self._params[0].list_ctx() if self._params else []
        self.buckets = self._flatten([i for i in self.numbers if params[i] not in pinned], params)
        self.buckets += [self._alone(i, params[i]) for i in self.numbers if params[i] in pinned]
        self._made = [self._arrays(param) for param in self._params]

    def holds(self, params: Sequence[gluon.Parameter]) -> bool:
        """Whether ``params`` still have the arrays that were made here, and no others."""
        trained = [param for param in params if param.grad_req != "null"]
        return len(trained) == len(self._params) and all(
            param is mine and _same(self._arrays(param), made)
            for param, mine, made in zip(trained, self._params, self._made)
        )

    def moved(self) -> list[gluon.Parameter]:
        """Parameters whose gradients autograd writes to other arrays than those made here.

        A network hybridized with ``static_alloc`` and ``static_shape`` writes to the arrays that it
        had at its first backward, for good, and makes them the gradients of whatever parameters it
        is given. ``param.list_grad()`` is made to tell the truth again.
        """
        found = []
        for param in self._params:
            true = [value.grad for value in param._data]
            if [*map(memory.chunk, true)] != [*map(memory.chunk, param._grad)]:
                param._grad[:] = true
                found.append(param)
        return found

    def fresh(self) -> list[list[bool]]:
        """Per parameter and device: whether backward has written its gradient since the update."""
        return [[value._fresh_grad for value in param._data] for param in self._params]

    def zero_stale(self) -> None:
        """Zero every gradient that is not fresh: it is what the device adds to the sum."""
        for param, on_devices in zip(self._params, self.fresh()):
            for grad, fresh in zip(param._grad, on_devices):
                if not fresh:
                    memory.zero(grad)

    def mark_used(self) -> None:
        """From now on, no gradient is fresh."""
        for param in self._params:
            for value in param._data:
                value._fresh_grad = False

    def set_grad_req(self, grad_req: str | None) -> None:
        """Let backward 'write' or 'add', whatever the parameters say; None: as they say."""
        for param in self._params:
            for value, grad in zip(param._data, param._grad):
                fresh = value._fresh_grad
                autograd.mark_variables([value], [grad], grad_req or param.grad_req)
                value._fresh_grad = fresh

    def without(self, absent: set[int]) -> list[Bucket]:
        """The buckets, as if the parameters of these numbers were not there."""
        kept = []
        for bucket in self.buckets:
            if absent.isdisjoint(bucket.indices):
                kept.append(bucket)
                continue
            for i in bucket.indices:
                if i not in absent:
                    param = self._params[self.numbers.index(i)]
                    kept.append(Bucket([i], _each_alone(param), param._grad, bucket.owner))
        return kept

    @staticmethod
    def _arrays(param: gluon.Parameter) -> tuple:
        return (*(param._data or ()), *(param._grad or ()))

    def _flatten(self, numbers: Sequence[int], params: Sequence[gluon.Parameter]) -> list[Bucket]:
        """Put the parameters' arrays into buckets, with what was in them."""
        if not numbers:
            return []
        chosen = [params[i] for i in numbers]
        replicas = [_replica(chosen, device) for device in range(len(self.ctx))]
        owners = partition.balance([*map(memory.num_bytes, replicas[0].grads)], len(replicas))
        found = []
        for members, owner, *grads in zip(
            replicas[0].members, owners, *(replica.grads for replica in replicas)
        ):
            values = [[replica[j] for j in members] for replica in replicas]
            found.append(Bucket([numbers[j] for j in members], values, grads, owner))
        return found

    def _alone(self, number: int, param: gluon.Parameter) -> Bucket:
        return Bucket([number], _each_alone(param), param._grad, number % len(self.ctx))


def listed(params) -> list[gluon.Parameter]:
    """The Parameters in a list or dict of them; what else is in it is gluon.Trainer's matter."""
    values = params.values() if hasattr(params, "values") else params
    if not isinstance(params, (list, tuple)) and values is params:
        return []
    return [param for param in values if isinstance(param, gluon.Parameter)]


def check(params) -> None:
    """Raise ValueError unless ``params`` are dense, on the same contexts, and each there once."""
    values = listed(params)
    for i, param in enumerate(values):
        if param in values[:i]:
            raise ValueError(f"parameter {param.name} is given more than once; give it once")
        if param._stype != "default" or param._grad_stype != "default":
            raise ValueError(
                f"parameter {param.name} is sparse ({param._stype}, gradient {param._grad_stype}), "
                "and only dense ones can be trained; make it with sparse_grad=False"
            )
        if param.list_ctx() != values[0].list_ctx():
            raise ValueError(
                f"parameter {param.name} is on {param.list_ctx()}, but {values[0].name} on "
                f"{values[0].list_ctx()}; initialize all on the same contexts"
            )


def _replica(params: Sequence[gluon.Parameter], device: int) -> Replica:
    """One device's arrays of ``params``, whose gradients are from now on views."""
    old = [(param._grad[device], param._data[device]._fresh_grad) for param in params]
    replica = Replica([param._data[device] for param in params])
    for param, value, (grad, fresh) in zip(params, replica, old):
        param._grad[device] = value.grad
        grad.copyto(param._grad[device])
        autograd.mark_variables([value], [param._grad[device]], param.grad_req)
        value._fresh_grad = fresh
    return replica


def _each_alone(param: gluon.Parameter) -> list[list[mx.nd.NDArray]]:
    return [[value] for value in param._data]


def _same(arrays: tuple, others: tuple) -> bool:
    return len(arrays) == len(others) and all(map(operator.is_, arrays, others))
