"""The gradients of Gluon parameters on their devices, found by their arrays' names on the tape."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Iterable

import mxnet as mx
from mxnet import gluon

from gluonpar.runtime import memory, private_fields, tape

_tracked: weakref.WeakKeyDictionary[gluon.Parameter, Gradients] = weakref.WeakKeyDictionary()
_by_name: dict[str, tuple[Gradients, int]] = {}  # and the device's index
_least_devices = 2  # of a parameter that is tracked as soon as it has gradients


def track(params: Iterable[gluon.Parameter]) -> None:
    """Watch from now on which passes write the gradients of ``params``, which may be deferred."""
    tape.watch()
    for param in params:
        if param not in _tracked:
            _tracked[param] = Gradients(param)


def track_on_one_device() -> None:
    """Track new parameters on one device, too: in a job of several processes there are others."""
    global _least_devices
    _least_devices = 1


def of(param: gluon.Parameter) -> Gradients:
    """Return the gradients of a tracked parameter."""
    return _tracked[param]


def named(names: Iterable[str]) -> list[tuple[Gradients, int]]:
    """Return the gradients of tracked parameters with these names, and the devices' indices."""
    return [_by_name[name] for name in names if name in _by_name]


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


def _tracking(change: Callable) -> Callable:
    """Track a parameter from then on: a Trainer may be made after the first backward."""

    @functools.wraps(change)
    def tracked(param: gluon.Parameter, *args: Any) -> None:
        change(param, *args)
        if param in _tracked:
            of(param).renew()
        elif len(private_fields.values(param) or ()) >= _least_devices:
            track([param])

    return tracked


for _function in (private_fields.ALLOCATES_GRADIENTS, private_fields.CASTS):
    private_fields.wrap(_function, _tracking)
