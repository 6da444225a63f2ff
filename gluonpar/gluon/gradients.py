"""The gradients of Gluon parameters on their devices, found by their arrays' names on the tape.

Passes add to them with ``no_sync`` or ``grad_req='add'``: where they are sums over devices, to one
of them. For ``no_sync``, MXNet's ``'add'`` is not used: the backward of some operators writes all
the same, and that of others to memory that is not theirs (MXNet 1.9.1: mean, clip, cumsum, ...).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Sequence

import mxnet as mx
from mxnet import autograd, gluon

from gluonpar.runtime import memory, private_fields, tape

# By id() of the first device's gradient, which may be another array's by now.
_by_grad: weakref.WeakValueDictionary[int, Gradients] = weakref.WeakValueDictionary()
tracked: weakref.WeakKeyDictionary[gluon.Parameter, Gradients] = weakref.WeakKeyDictionary()


class Gradients:
    """Of one parameter, by device. MXNet's flags say which of them count."""

    batch: Any  # that wrote last: see batches

    def __init__(self, param: gluon.Parameter) -> None:
        self._names: list[str] = []  # in tape.owners
        self.param = weakref.ref(param, functools.partial(_forget, self._names))
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
        self.sum_on: Any = None  # if they are sums: the devices of which the next sum adds them
        self.time, self.num_written = 0, [0] * len(self.values)  # see ages
        _forget(self._names)
        self._variables = [tape.graph_of(value.handle) for value in self.values]  # kept
        self._written = [*map(memory.grad_pointer, self.values)]
        self._chunks = [*map(memory.chunk, self.grads)]
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
