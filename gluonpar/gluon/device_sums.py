"""Sums of numbers over devices, each of which adds its own when it comes to it; no thread waits."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
import time
import traceback
import weakref
from typing import Callable, Hashable

import mxnet as mx
import numpy as np

_all: weakref.WeakSet[DeviceSums] = weakref.WeakSet()
_start_lock = threading.Lock()
_abandoned = ""  # why no sum will become complete, while a failed step's operators end

Done = Callable[[np.ndarray], None]
Failed = Callable[[str], None]


class _Sum:
    """What the devices have given so far, and the callbacks of each."""

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}
        self.callbacks: list[tuple[Done, Failed]] = []
        self.began = time.monotonic()


class DeviceSums:
    """Sums over ``num_devices()`` devices, one after another. Any thread may call the methods."""

    def __init__(
        self, name: str, num_devices: Callable[[], int], timeout_seconds: float = 300
    ) -> None:
        self.name, self.num_devices, self.timeout_seconds = name, num_devices, timeout_seconds
        self.lock = threading.RLock()
        self._incomplete: dict[Hashable, _Sum] = {}
        self._begun: collections.Counter = collections.Counter()  # by device
        self._first = 0  # numbers of sums before a failure are not used again
        _all.add(self)

    def begin(self, device: str) -> int:
        """Return the number of this device's next sum, which is the same on all devices."""
        with self.lock:
            self._begun[device] += 1
            return self._first + self._begun[device]

    def add(
        self, key: Hashable, device: str, values: np.ndarray, done: Done, failed: Failed
    ) -> None:
        """Add ``values`` to the sum ``key``; returns at once.

        With the last device's values, ``done`` of each device is called with the float64 sum, on
        the calling thread. Values are added in the order of the devices' names, so the order in
        which they arrive does not change a bit. If a device has not arrived after
        ``timeout_seconds``, or more arrive than there are, ``failed`` of those that have arrived is
        called with a message.
        """
        _start_watch()  # before others can complete the sum, after which the process may end
        with self.lock:
            current = self._incomplete.setdefault(key, _Sum())
            current.values[device] = np.asarray(values, dtype=np.float64)
            current.callbacks.append((done, failed))
            num_devices, devices = self.num_devices(), sorted(self._begun)
            too_many = len(devices) > num_devices
            complete = not too_many and len(current.values) == num_devices
            if complete:
                del self._incomplete[key]
        if too_many:
            self.fail(f"num_devices is {num_devices}, but {', '.join(devices)} take part")
        elif complete:
            total = sum(current.values[name] for name in sorted(current.values))
            for done, failed in current.callbacks:
                try:
                    done(total)
                except Exception:  # of one device; the others must go on
                    failed(traceback.format_exc())
        elif _abandoned:
            self.fail(_abandoned)

    def restart(self) -> None:
        """Give all devices the same next number, however many sums each has begun."""
        with self.lock:
            self._first += max(self._begun.values(), default=0)
            self._begun.clear()

    def fail(self, why: str) -> None:
        """Fail all incomplete sums."""
        with self.lock:
            sums = list(self._incomplete.values())
            self._incomplete.clear()
        for current in sums:
            message = (
                f"{self.name}: {why}. Of {self.num_devices()} devices only "
                f"{', '.join(sorted(current.values))} arrived. Run forward on all devices before "
                "reading any result, and backward likewise, on CPU contexts both in run_tasks; for "
                "a step on another number of devices call set_num_devices(net, number)"
            )
            for _, failed in current.callbacks:
                failed(message)

    def fail_late(self) -> None:
        """Fail and restart if a sum has been incomplete for longer than ``timeout_seconds``."""
        latest = time.monotonic() - self.timeout_seconds
        with self.lock:
            late = any(current.began < latest for current in self._incomplete.values())
            if late:
                self.restart()
        if late:
            self.fail(f"a device is missing after {self.timeout_seconds:g} s")


def abandon(why: str) -> None:
    """After a failed step: fail incomplete sums, wait for all operators, and start afresh."""
    global _abandoned
    everything = list(_all)
    if not everything:
        return
    _abandoned = why
    try:
        for sums in everything:
            sums.fail(why)
        with contextlib.suppress(mx.MXNetError):
            mx.nd.waitall()
    finally:
        _abandoned = ""
        for sums in everything:
            sums.restart()


def _start_watch() -> None:
    with _start_lock:
        _start_once()


@functools.lru_cache(None)
def _start_once() -> None:
    threading.Thread(target=_watch, name="gluonpar device sums", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(1)
        for sums in list(_all):
            sums.fail_late()


def _after_fork() -> None:
    """Only this thread is left: no operator runs, but another thread may have held a lock."""
    global _start_lock
    _start_lock = threading.Lock()
    _start_once.cache_clear()
    for sums in list(_all):
        sums.lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
