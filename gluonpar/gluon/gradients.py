"""The gradients of Gluon parameters on their devices, found by their arrays' names on the tape.

Passes add to them with ``no_sync`` or ``grad_req='add'``: where they are sums over devices, to one
of them. For ``no_sync``, MXNet's ``'add'`` is not used: the backward of some operators overwrites
the gradient all the same, and others write to memory that is not theirs (MXNet 1.9.1: mean, clip,
cumsum, ...).

Before the sum over devices ``list_grad()`` holds parts, and none is the gradient of the batch.
Sums are made by a Trainer, or by the program, with :func:`gluonpar.allreduce` or
``allreduce_many``. By them, and not by parts, a program may clip and update.

A rank without samples has no pass. Its gradients are of an earlier batch, and must not be added to
other ranks' gradients. So ranks compare ages: each counts, for each parameter, the sums
before its gradient was written, and how often it was written since. Both are the same on all ranks
that had samples, whatever their devices, and less on those that had none.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluonpar import cluster
from gluonpar.collectives import operations
from gluonpar.runtime import memory, private_fields, tape

# By id() of the first device's gradient, which may be another array's by now.
_by_grad: weakref.WeakValueDictionary[int, Gradients] = weakref.WeakValueDictionary()
tracked: weakref.WeakKeyDictionary[gluon.Parameter, Gradients] = weakref.WeakKeyDictionary()
_num_sums = 0  # of gradients, over devices and ranks


class Gradients:
    """The gradients of one parameter, by device. MXNet's flags say which of them count."""

    batch: Any  # that wrote last: see batches

    def __init__(self, param: gluon.Parameter) -> None:
        self._names: list[str] = []  # in tape.owners
        self.param: Callable[[], Any] = weakref.ref(param, functools.partial(_forget, self._names))
        self.grads: list[mx.nd.NDArray] = []
        self.accumulates = False  # whether passes add until the next update
        self.renew()

    def renew(self) -> None:
        """Look up the parameter's arrays and their names, which may be others than before."""
        param = self.param()
        self._grads = private_fields.grads(param)
        self.grads = self._grads or []
        self.values: list[mx.nd.NDArray] = private_fields.values(param) if self.grads else []
        self.devices = [(c.device_typeid, c.device_id) for c in (v.context for v in self.values)]
        self.adds_always = param.grad_req == "add"
        self.batch = type(self).batch
        self.beside: set[Any] = set()  # batches of passes that have added to these gradients
        self.wrote: list[Any] = [None] * len(self.values)  # the part of a batch
        self.sum_on: Any = None  # if they are sums: the devices whose sums the next sum adds
        self._time, self._num_written = 0, [0] * len(self.values)  # the age
        _forget(self._names)
        self._variables: list[Any] = [tape.graph_of(value.handle) for value in self.values]  # kept
        self._written = [*map(memory.grad_pointer, self.values)]
        self._chunks: list[int | None] = [*map(memory.chunk, self.grads)]
        self._names += [variable.name for variable in self._variables]
        tape.owners.update((name, (self, i)) for i, name in enumerate(self._names))
        _by_grad.update((id(grad), self) for grad in self.grads[:1])
        if any(memory.grad_flags(self.values)):
            for i in range(len(self.values)):
                self.follow(i)

    def fresh(self) -> list[bool]:
        """Return by device whether the gradient counts: with grad_req='add' all do or none."""
        if self._grads is not private_fields.grads(self.param()):
            self.renew()  # it has been frozen
        flags = memory.grad_flags(self.values)
        return [any(flags)] * len(flags) if self.adds_always else flags

    def summands(self) -> list[bool]:
        """Return by device whether the next sum adds the gradient: if they are sums, one does."""
        fresh, on = self.fresh(), self.sum_on  # in this order
        return [counts and (on is None or i in on) for i, counts in enumerate(fresh)]

    def follow(self, i: int) -> None:
        """Have ``list_grad()[i]`` be the array that backward has written, which may be another one.

        A graph with ``static_shape`` keeps writing to the array of its first pass, and MXNet makes
        that the gradient. In a pass that adds several gradients it is an array of the pass; a
        parameter that has been moved, or whose ``grad_req`` has changed, has another one, too.
        """
        written = self._written[i].value
        if written != self._chunks[i]:
            _by_grad.pop(id(self.grads[0]), None)
            self.grads[i], self._chunks[i] = self.values[i].grad, written
            _by_grad[id(self.grads[0])] = self

    def adds(self) -> bool:
        """Return whether gradients of earlier passes count, too."""
        return self.adds_always or self.accumulates

    def prepare_to_add(self, i: int) -> mx.nd.NDArray | None:
        """Before a pass that adds on device ``i``, return a copy of what it will overwrite."""
        with autograd.pause():
            if self.sum_on is not None:
                memory.zero([grad for j, grad in enumerate(self.grads) if j not in self.sum_on])
                self.sum_on = None
            overwrites = not self.adds_always and any(memory.grad_flags([self.values[i]]))
            return self.grads[i].copy() if overwrites else None

    def become_sums(self, devices: Any) -> None:
        """Note that they are sums, of the last sum, which the next sum adds on ``devices``."""
        self.sum_on = devices
        self._time, self._num_written = _num_sums - 1, [0] * len(self.values)

    def count(self, i: int) -> None:
        """Count that the gradient on device ``i`` is written by another recording than before."""
        if self._time != _num_sums:
            self._time, self._num_written = _num_sums, [0] * len(self.values)
        self._num_written[i] += 1

    def age(self) -> tuple[int, int]:
        """Return both counts, the first one -1 if no gradient counts. What passes add to is new."""
        if not any(self.fresh()):
            return -1, 0
        return (_num_sums, 0) if self.adds() else (self._time, max(self._num_written))


def _forget(names: list[str], _: Any = None) -> None:
    for name in names:
        tape.owners.pop(name, None)
    names.clear()


def param_of(arrays: Sequence[mx.nd.NDArray]) -> gluon.Parameter | None:
    """Return the tracked parameter whose gradients these arrays are, if there is one."""
    grads = _by_grad.get(id(arrays[0])) if arrays else None
    if grads and [*map(id, arrays)] == [*map(id, grads.grads)]:
        return grads.param()
    return None


def _note_sums(lists: Iterable[Sequence[mx.nd.NDArray]]) -> None:
    """Note that a program has summed gradients over all devices: the next sum adds each again."""
    for param in filter(None, map(param_of, lists)):
        grads = tracked[param]
        grads.sum_on = range(len(grads.values))


operations.after_sums.append(_note_sums)


def are_sums(params: Sequence[gluon.Parameter]) -> bool:
    """Return whether some gradients of tracked ``params`` are sums, and all that count."""
    of_params = [tracked[param] for param in params]
    parts = [grads for grads in of_params if grads.sum_on is None]
    return len(parts) < len(params) and not any(any(grads.fresh()) for grads in parts)


def check_summed(params: Iterable[gluon.Parameter]) -> None:
    """Raise ValueError if gradients of ``params`` have been written since they were summed."""
    for param in filter(tracked.__contains__, params):
        grads = tracked[param]
        is_sum = len(grads.values) * cluster.size() == 1 or grads.sum_on is not None
        if not is_sum and any(grads.fresh()):
            raise ValueError(
                f"backward has written the gradient of {param.name} since the last sum over "
                "devices; call allreduce_grads() before update(), or step() instead of both"
            )


def summands(
    params: Sequence[gluon.Parameter],
    num_processes: int,
    of: str,
    facts: dict[str, Any] | None = None,
) -> tuple[list[list[bool]], list[bool]]:
    """Return per parameter, by device, whether its gradient is added in the sum that comes next.

    And per parameter, whether one is on some rank. All ranks call this before each sum, with the
    same name ``of`` whose gradients these are, and the same ``facts``; gradients older than other
    ranks' are not added. A rank that has new gradients of all parameters does not wait.
    """
    global _num_sums
    of_params = [tracked[param] for param in params]
    counting = [grads.summands() for grads in of_params]
    on_some_rank = [*map(any, counting)]
    if num_processes > 1 and (params or facts):
        ages = np.array([grads.age() for grads in of_params]).reshape(-1, 2)
        of_ranks = cluster.PendingGather(ages, f"gradients of {of}", _check_ages, facts)
        _num_sums += 1
        if (ages[:, 0] != _num_sums - 1).any():  # some may be old
            newest = np.max(of_ranks.wait(), axis=0)[:, 0]
            on_some_rank = (newest >= 0).tolist()
            for i in np.flatnonzero(ages[:, 0] < newest):
                counting[i] = [False] * len(counting[i])
    return counting, on_some_rank


def _check_ages(of_ranks: Sequence[np.ndarray]) -> None:
    """Raise ValueError if it cannot be told which ranks had samples of the last batch."""
    sums, written = np.array(of_ranks).transpose(2, 0, 1)
    newest = sums == sums.max(axis=0)
    most = np.where(newest, written, -1).max(axis=0)
    least = np.where(newest, written, np.iinfo("int64").max).min(axis=0)
    if (most != least).any():
        raise ValueError(
            "since the last step, ranks ran backward for different numbers of batches, so which "
            "gradients are of the last batch cannot be told; call step() or allreduce_grads() on "
            "all ranks for each batch, also on ranks without samples"
        )
