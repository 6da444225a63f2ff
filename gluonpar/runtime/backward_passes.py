"""Which backward pass wrote the gradient of a Gluon parameter on each device.

On one device, with ``grad_req='write'``, a gradient is that of the last backward pass that reached
the parameter; what earlier passes wrote is gone. On several devices the backward of one batch is
one pass or, in a loop over devices, one pass per device. With fewer samples than devices some of
these do not take place, and the gradients of an earlier batch remain there, which must not count.
MXNet's own flag, ``_fresh_grad``, does not tell them apart: it says that some backward pass has
written the gradient since the last update. So here passes have numbers, and a pass that overwrites
what pass m wrote discards what pass m and later ones wrote on other devices.

Passes that overlap, on several threads, have one number. For all that a function of MXNet's C
interface is replaced by one that calls it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from typing import Any, Iterable, Iterator

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.base import _LIB

from gluonpar.runtime import interrupts

_tracked: weakref.WeakKeyDictionary[gluon.Parameter, _Writes] = weakref.WeakKeyDictionary()
_number = 1  # of the last pass; the first stands for all those before a parameter was tracked
_num_sums = 0  # of gradients, over devices and ranks
_running = 0  # passes that have begun and not ended
_lock = threading.Lock()
_backward, _get_flag = _LIB.MXAutogradBackwardEx, _LIB.MXNDArrayGetGradState
_flag = ctypes.c_int()
_flag_pointer = ctypes.byref(_flag)


def clear_flags(arrays: Iterable[mx.nd.NDArray]) -> None:
    """Clear MXNet's flags that backward has written the arrays' gradients, where they have any."""
    for array in arrays:
        _LIB.MXNDArraySetGradState(array.handle, 0)  # an error, where there is no gradient


def flags(arrays: Iterable[mx.nd.NDArray]) -> list[bool]:
    """Return MXNet's flags that backward has written the arrays' gradients."""
    found = []
    for array in arrays:
        _get_flag(array.handle, _flag_pointer)
        found.append(_flag.value != 0)
    return found


def track(params: Iterable[gluon.Parameter]) -> None:
    """Note from now on which passes write the gradients of ``params``, which may be deferred."""
    with _lock:
        for param in params:
            if param not in _tracked:
                _tracked[param] = _Writes(param)


def fresh(param: gluon.Parameter) -> list[bool]:
    """Return by device whether the gradient of a tracked parameter counts.

    It does if backward has written it since :func:`mark_used` and no later pass discarded it.
    """
    with _lock:
        return [number > 0 for number in _tracked[param].passes()]


def age(param: gluon.Parameter) -> tuple[int, int]:
    """Return when the gradient of a tracked parameter was written; (-1, 0) if none counts.

    That is after how many sums (:func:`num_sums`), and after how many times since then that an
    unused gradient was overwritten. The age is the same on all ranks that had samples of a batch,
    and less on those that had none.
    """
    with _lock:
        writes = _tracked[param]
        return (writes.time, writes.skipped) if any(writes.passes()) else (-1, 0)


def num_sums() -> int:
    """Return how often :func:`count_sum` has been called."""
    return _num_sums


def count_sum() -> None:
    """Count a sum of gradients, of any parameters, in which all ranks take part."""
    global _num_sums
    _num_sums += 1


def mark_used(params: Iterable[gluon.Parameter]) -> None:
    """Let no gradient of the tracked ``params`` count until backward has written it again."""
    with _lock:
        for param in params:
            _tracked[param].forget()


def accumulate(params: Iterable[gluon.Parameter], on: bool) -> None:
    """Have each pass add to the gradients of the tracked ``params`` that count, or write them.

    MXNet's ``grad_req='add'`` is not used: the backward of some operators writes all the same, and
    that of others to memory that is not theirs (MXNet 1.9.1: mean, clip, cumsum, linalg.det, ...).
    """
    with _lock:
        for param in params:
            _tracked[param].accumulates = on


@contextlib.contextmanager
def _one_pass() -> Iterator[None]:
    """Note what is written within this context; passes that overlap, on other threads, are one."""
    global _number, _running
    with _lock:
        if not _running:
            for writes in [*_tracked.values()]:
                writes.begin()
            _number += 1
        _running += 1
        for writes in [*_tracked.values()]:
            writes.save()
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            for writes in [*_tracked.values()]:
                writes.note()
                if not _running:
                    writes.end()


class _Writes:
    """By device, the pass that wrote one parameter's gradient last; 0 if that does not count."""

    def __init__(self, param: gluon.Parameter) -> None:
        self._param = weakref.ref(param)
        self._values: list[mx.nd.NDArray] | None = None  # what the rest is about
        self._grads: list[mx.nd.NDArray] | None = None
        self._passes: list[int] = []
        self._adds = False  # by itself: grad_req='add'
        self._saved: dict[int, mx.nd.NDArray] = {}  # by device: to be added to what a pass writes
        self.accumulates = False
        self.time = self.skipped = 0

    def passes(self) -> list[int]:
        """Return the passes, after what has been done to the flags without a pass.

        One that was set before the parameter was tracked counts as of the last pass; one that has
        been cleared, as by another trainer's update, does not count any more.
        """
        param = self._param()
        if param is None:  # it is about to leave _tracked
            return []
        if self._values is not param._data or self._grads is not param._grad:
            # Its arrays are others: it was initialised, cast or moved, or its grad_req changed.
            self._values, self._grads = param._data, param._grad
            self._passes = [0] * len(self._values if self._grads else ())
            self._adds = param.grad_req == "add"
        if not _running:
            self._passes = [
                (number or _number) if written else 0
                for number, written in zip(self._passes, self._written())
            ]
        return self._passes

    def begin(self) -> None:
        """Clear the flags, so that those are seen which the pass sets that begins now."""
        if any(self.passes()):
            clear_flags(self._values)

    def save(self) -> None:
        """Save what counts so far, if the next pass shall add to it."""
        if not self.accumulates or self._adds:
            return
        with autograd.pause():
            for i, number in enumerate(self._passes):
                if number and i not in self._saved:
                    self._saved[i] = self._grads[i].copy()
                    clear_flags([self._values[i]])

    def note(self) -> None:
        """Note what the pass that runs has written, and what is out of date by that."""
        self._add_saved()
        before, passes = self._passes, zip(self._passes, self._written())
        self._passes = [_number if written else number for number, written in passes]
        if _number not in self._passes:
            return
        is_first = self.time != _num_sums
        if is_first:
            self.time, self.skipped = _num_sums, 0
        overwritten = [m for m, n in zip(before, self._passes) if 0 < m < n]
        if overwritten and not (self._adds or self.accumulates):
            first = min(overwritten)
            self._passes = [n if n == _number or n < first else 0 for n in self._passes]
            self.skipped += not is_first

    def _add_saved(self) -> None:
        with autograd.pause():
            for i, written in enumerate(self._written() if self._saved else ()):
                if written and i in self._saved:
                    self._grads[i] += self._saved.pop(i)

    def end(self) -> None:
        """Set MXNet's flag of each gradient that counts, for other programs that read it."""
        self._saved.clear()
        for value, number in zip(self._values or (), self._passes):
            if number and (number < _number or self.accumulates):
                value._fresh_grad = True

    def forget(self) -> None:
        """Let no gradient count."""
        if self.passes():
            clear_flags(self._values)
        self._passes = [0] * len(self._passes)

    def _written(self) -> list[bool]:
        return flags(self._values if self._passes else ())


@functools.wraps(_backward)
def _numbered_backward(*arguments: Any) -> int:
    with interrupts.held(), _one_pass():
        return _backward(*arguments)


_LIB.MXAutogradBackwardEx = _numbered_backward
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
