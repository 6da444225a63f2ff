"""Sums of numbers over devices, each of which adds its own when it comes to it; no thread waits.

Each belongs to a round, a call of run_tasks or the like, and is over as many devices as the round
has. The n-th sum that a layer begins in the round on one device is its n-th on all. However a round
ends, the next one has new sums.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
import traceback
from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np

from gluonpar import cluster
from gluonpar.runtime import device_threads


class SumKey(NamedTuple):
    """A sum, or that of the gradients with respect to it."""

    round: Round
    layer: Any  # has a name and timeout_seconds
    number: int
    is_of_gradients: bool = False


class Round:
    """A call of functions on ``num_devices`` devices at once."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices, self.failed = num_devices, ""  # why a device is missing, if one is
        # Per device that was called, how often its thread had called backward before.
        self.num_backwards: dict[mx.Context, int] = {}
        self.written: list = []  # by passes on their threads: see batches.discard
        self.begun: dict[Any, collections.Counter] = {}  # number of sums, by layer and device

    def call(self, ctx: mx.Context, function: Callable, *arguments: Any) -> Any:
        """Call ``function(*arguments)`` on the thread of ``ctx``, in this round."""
        scope = cluster.scope()

        def in_round() -> Any:
            outer, _this.round = current_round(), self
            try:
                with scope():
                    return function(*arguments)
            finally:
                _this.round = outer

        self.num_backwards.setdefault(ctx, device_threads.num_backwards(ctx))
        return device_threads.call(ctx, in_round)

    def has_begun_backward(self, ctx: mx.Context) -> bool:
        """Return whether the thread of ``ctx`` has called backward since it was first called."""
        return device_threads.num_backwards(ctx) != self.num_backwards.get(ctx)

    def begin(self, layer: Any, ctx: mx.Context) -> SumKey:
        """Return the key of the layer's next sum on ``ctx``."""
        global _is_used
        device_threads.start(ctx)  # it looks for sums that have waited too long
        with lock:
            _is_used, device = True, str(ctx)
            begun = self.begun.setdefault(layer, collections.Counter())
            begun[device] += 1
            return SumKey(self, layer, begun[device])

    def check_begun(self) -> None:
        """Raise RuntimeError unless every layer has begun as many sums on each device."""
        for layer, begun in self.begun.items():
            if len(begun) < self.num_devices or len({*begun.values()}) > 1:
                counts = ", ".join(f"{begun[device]} on {device}" for device in sorted(begun))
                raise RuntimeError(
                    f"{layer.name} must be called equally often on all {self.num_devices} devices; "
                    f"it began these numbers of sums: {counts}"
                )


class _Sum:
    """The values that have arrived so far, and the callbacks of each device."""

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}
        self.callbacks: list[tuple[Callable, Callable]] = []
        self.began = time.monotonic()


lock = threading.Lock()
_incomplete: dict[SumKey, _Sum] = {}
_is_used = False  # whether a sum has begun in this process
_abandoned = ""  # why, while the operators of a failed round end
_this = threading.local()  # .round


def current_round() -> Round | None:
    """Return the round that this thread was called in, if it was."""
    return getattr(_this, "round", None)


def add(key: SumKey, device: str, values: np.ndarray, done: Callable, failed: Callable) -> None:
    """Add ``values`` to the sum ``key``; returns at once.

    With the last device's values, ``done`` of each device is called with the float64 sum, on the
    calling thread. Values are added in the order of the devices' names, so the order in which they
    arrive does not change a bit. If a device has not arrived after ``timeout_seconds``, or the
    round has failed, ``failed`` of those that have arrived is called with a message.
    """
    with lock:
        current = _incomplete.setdefault(key, _Sum())
        current.values[device] = np.asarray(values, dtype=np.float64)
        current.callbacks.append((done, failed))
        complete = len(current.values) == key.round.num_devices and not _why_lost(key)
        if complete:
            del _incomplete[key]
    if not complete:
        _fail_lost()
        return
    total = sum(current.values[name] for name in sorted(current.values))
    for done, failed in current.callbacks:
        try:
            done(total)
        except Exception:  # of one device; the others must go on
            failed(traceback.format_exc())


def abandon(round_: Round) -> None:
    """After an error in a task: let nothing wait for its device, and wait for all operators.

    Waiting clears the errors of the sums that fail. Sums of earlier rounds are completed, unless
    they are of gradients and the error came before a device's backward, which need not be in the
    round of its forward.
    """
    global _abandoned
    if not _is_used:
        return
    round_.failed = _abandoned = "a task failed on another device"
    try:
        _fail_lost()
        with contextlib.suppress(mx.MXNetError):
            mx.nd.waitall()
    finally:
        _abandoned = ""


def _why_lost(key: SumKey) -> str:
    """Return why a sum will not become complete; an empty string if it may."""
    num_devices, devices = key.round.num_devices, sorted(key.round.begun[key.layer])
    if len(devices) > num_devices:
        return f"num_devices is {num_devices}, but {', '.join(devices)} take part"
    if _abandoned and key.is_of_gradients:
        if not all(map(key.round.has_begun_backward, list(key.round.num_backwards))):
            return _abandoned
    return key.round.failed


def _fail_lost() -> None:
    """Fail the incomplete sums that will not become complete."""
    with lock:
        lost = [(key, why) for key in _incomplete if (why := _why_lost(key))]
        sums = [_incomplete.pop(key) for key, _ in lost]
    for (key, why), current in zip(lost, sums):
        message = (
            f"{key.layer.name}: {why}. Of {key.round.num_devices} devices only "
            f"{', '.join(sorted(current.values))} arrived. Run forward on all devices before "
            "reading any result, and backward likewise, on CPU contexts both in run_tasks; for "
            "a plain loop over another number of devices call set_num_devices(net, number)"
        )
        for _, failed in current.callbacks:
            failed(message)


def _fail_late() -> None:
    """Fail the sums that have waited for more than ``timeout_seconds``.

    If an operator fails on one device after run_tasks has returned, only a clock can tell that the
    other devices wait for it.
    """
    with lock:
        for key, current in _incomplete.items():
            seconds = key.layer.timeout_seconds
            if time.monotonic() - current.began > seconds:
                key.round.failed = f"a device is missing after {seconds:g} s"
    _fail_lost()


device_threads.while_waiting(_fail_late)


def _after_fork() -> None:
    global lock
    lock = threading.Lock()  # another thread of the parent may hold it


os.register_at_fork(after_in_child=_after_fork)
