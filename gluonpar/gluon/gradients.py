"""The gradients of Gluon parameters on their devices, found by their arrays' names on the tape."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Iterable

import mxnet as mx
from mxnet import gluon

from gluonpar.runtime import memory, private_fields, tape

_tracked: weakref.WeakKeyDictionary[gluon.Parameter, Gradients] = weakref.WeakKeyDictionary()
_by_name: dict[str, tuple[Gradients, int]] = {}  # and the device's index


def add(param: gluon.Parameter) -> None:
    """Track a parameter, which may be deferred, or look up its arrays anew."""
    if param in _tracked:
        _tracked[param].renew()
    else:
        _tracked[param] = Gradients(param)


def of(param: gluon.Parameter) -> Gradients | None:
    """Return the gradients of a parameter, if it is tracked."""
    return _tracked.get(param)


def named(names: Iterable[str]) -> list[tuple[Gradients, int]]:
    """Return the gradients of tracked parameters with these names, and the devices' indices."""
    return [*filter(None, map(_by_name.get, names))]


def renamed(names: Iterable[str]) -> None:
    """Look up the names of parameters anew of which an array had one of ``names``."""
    for grads, _ in named(names):
        grads.renew()


class Gradients:
    """Of one parameter, by device. MXNet's flags say which of them count."""

    batch: Any  # that wrote last: see batches

    def __init__(self, param: gluon.Parameter) -> None:
        self._names: list[str] = []
        self._param = weakref.ref(param, functools.partial(_forget, self._names))
        self.grads: list[mx.nd.NDArray] = []
        self._is_replaced = False  # whether the arrays are not the first
        self.accumulates = False  # whether passes add until the next update
        self.renew()

    def renew(self) -> None:
        """Look up the parameter's arrays and their names, which may be others than before."""
        param = self._param()
        self._follows, self._is_replaced = True, bool(self.grads) or self._is_replaced
        self._grads = private_fields.grads(param)
        self.grads = self._grads or []
        self.values: list[mx.nd.NDArray] = private_fields.values(param) if self.grads else []
        self.devices = [(c.device_typeid, c.device_id) for c in (v.context for v in self.values)]
        self.adds_always = param.grad_req == "add"
        self.batch = type(self).batch
        self.wrote: list[Any] = [None] * len(self.values)  # the part of a batch
        self.sum_on: Any = None  # if they are sums: the devices of which the next sum adds them
        self.time, self.num_written = 0, [0] * len(self.values)  # see ages
        _forget(self._names)
        self._names += map(tape.name, self.values)
        _by_name.update((name, (self, i)) for i, name in enumerate(self._names))
        if any(memory.grad_flags(self.values)):
            self.follow()

    def flags(self) -> list[bool]:
        """Return by device whether MXNet's flag is set, that backward has written the gradient."""
        if self._grads is not private_fields.grads(self._param()):
            self.renew()  # it has been frozen
        return memory.grad_flags(self.values)

    def follow(self) -> None:
        """Have ``list_grad()`` return the arrays that backward has written, which may be others.

        A graph with static memory keeps writing to those of its first pass, and MXNet gives a
        parameter others when it is moved, or when its ``grad_req`` changes.
        """
        if self._follows:
            self._follows = self._is_replaced
            for i, value in enumerate(self.values):
                if memory.grad_chunk(value) != memory.chunk(self.grads[i]):
                    self.grads[i] = value.grad

    @property
    def adds(self) -> bool:
        """Whether gradients of earlier passes count, too."""
        return self.adds_always or self.accumulates


def _forget(names: list[str], _: Any = None) -> None:
    for name in names:
        _by_name.pop(name, None)
    names.clear()
