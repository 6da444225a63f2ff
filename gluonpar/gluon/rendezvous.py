"""A rendezvous of devices, where each is given the sum of all values; no thread waits there."""

from __future__ import annotations

import atexit
import collections
import itertools
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from typing import Callable, Hashable, NamedTuple

import numpy as np

_all: weakref.WeakSet[Rendezvous] = weakref.WeakSet()

WARN_SECONDS = 20  # after which a warning says who is waited for
EXIT_SECONDS = 10  # for devices that are still computing when the process ends
Done = Callable[[np.ndarray], None]
Failed = Callable[[str], None]


class _Round:
    """One meeting: what the devices that have arrived gave, and whom to tell the sum."""

    def __init__(self, now: float) -> None:
        self.values: dict[str, np.ndarray] = {}
        self.waiting: list[tuple[Done, Failed]] = []
        self.began, self.warned = now, False


class Rendezvous:
    """Sums of numbers over ``num_devices()`` devices, round after round.

    Its functions can be called on any thread.
    """

    def __init__(
        self, name: str, num_devices: Callable[[], int], timeout_seconds: float = 300
    ) -> None:
        self.name, self.num_devices, self.timeout_seconds = name, num_devices, timeout_seconds
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        """Begin, or begin again in a process that was forked."""
        self._lock = threading.RLock()
        self._rounds: dict[Hashable, _Round] = {}
        self._begun: collections.Counter = collections.Counter()
        self._first_round = 0  # the rounds of a failed rendezvous are not used again

    def begin(self, device: str) -> int:
        """Return the number of this device's next round, which is the same on all devices."""
        with self._lock:
            self._begun[device] += 1
            return self._first_round + self._begun[device]

    def arrive(
        self, tag: Hashable, device: str, values: np.ndarray, done: Done, failed: Failed
    ) -> None:
        """Take part in the round ``tag``; returns at once.

        When all devices have arrived, ``done`` of each is called with the float64 sum of their
        values, on the thread that arrives last. Values are added in the order of the devices'
        names, whichever order they arrive in. If a device is missing after ``timeout_seconds``,
        ``failed`` of those that have arrived is called with a message; the next round starts
        afresh. If more devices take part than there are, ``failed`` of all is called.
        """
        with self._lock:
            if len(self._begun) > self.num_devices():
                called = ", ".join(sorted(self._begun))
                why = (
                    f"{self.name}: {called} take part, but num_devices is {self.num_devices()}; "
                    "call set_num_devices(net, number), or pass num_devices to SyncBatchNorm"
                )
                waiting = [one.waiting for one in self._rounds.values()]
                self._rounds.clear()
                for _, fail in [*itertools.chain(*waiting), (done, failed)]:
                    fail(why)
                return
            meeting = self._rounds.setdefault(tag, _Round(time.monotonic()))
            meeting.values[device] = np.asarray(values, dtype=np.float64)
            meeting.waiting.append((done, failed))
            complete = len(meeting.values) >= self.num_devices()
            if complete:
                del self._rounds[tag]
        if complete:
            total = sum(meeting.values[name] for name in sorted(meeting.values))
            for done, failed in meeting.waiting:
                try:
                    done(total)
                except Exception:  # of one device; the others must go on
                    failed(traceback.format_exc())
        elif _closed and time.monotonic() >= _closed.at:
            self.abandon(_closed.why)
        else:
            seconds = EXIT_SECONDS if _closed else WARN_SECONDS
            _watch.notice(min(seconds, self.timeout_seconds))

    def restart(self) -> None:
        """Give all devices the same next round, however many each has taken part in."""
        with self._lock:
            self._first_round += max(self._begun.values(), default=0)
            self._begun.clear()

    def abandon(self, why: str) -> None:
        """Fail all rounds that lack a device."""
        for tag in list(self._rounds):
            self._fail(tag, why)

    def is_open(self) -> bool:
        """Return whether a round lacks a device."""
        return bool(self._rounds)

    def check(self) -> float:
        """Warn of rounds that wait long, fail those that wait too long; return the next time."""
        now, next_time = time.monotonic(), float("inf")
        with self._lock:
            rounds = list(self._rounds.items())
        for tag, meeting in rounds:
            ends = meeting.began + self.timeout_seconds
            warns = meeting.began + WARN_SECONDS
            if _closed and now >= _closed.at:
                self._fail(tag, _closed.why)
            elif now >= ends:
                self._fail(tag, f"within {self.timeout_seconds:g} s")
            elif now >= warns and not meeting.warned:
                meeting.warned = True
                _warn(
                    f"{self._missing(meeting, f'within {WARN_SECONDS} s')}. Waiting on, for "
                    f"{self.timeout_seconds:g} s"
                )
            next_time = min(next_time, ends if meeting.warned else min(ends, warns))
        return min(next_time, _closed.at) if _closed and rounds else next_time

    def _fail(self, tag: Hashable, when: str) -> None:
        with self._lock:
            meeting = self._rounds.pop(tag, None)
            if meeting is None:  # just completed
                return
            self.restart()
        for _, failed in meeting.waiting:
            failed(self._missing(meeting, when))

    def _missing(self, meeting: _Round, when: str) -> str:
        arrived = ", ".join(sorted(meeting.values))
        return (
            f"{self.name}: of {self.num_devices()} devices only {arrived} arrived {when}. Run "
            "forward on all devices before reading any result, and backward likewise, on CPU "
            "contexts both in run_tasks; for a step on fewer devices call "
            "set_num_devices(net, number)"
        )


def _warn(text: str) -> None:
    try:
        warnings.warn(text, stacklevel=2)
    except UserWarning:  # by -W error; on the thread that watches nobody could catch it
        print(f"gluonpar: UserWarning: {text}", file=sys.stderr, flush=True)


class _Watch:
    """A thread that checks every rendezvous when one may have waited too long."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wakes: float | None = None  # at this time; None if there is no thread

    def notice(self, seconds: float) -> None:
        """Check in ``seconds``, or before."""
        wakes = time.monotonic() + seconds
        if self._wakes is not None and self._wakes <= wakes:
            return
        with self._changed:
            if self._wakes is None:
                threading.Thread(target=self._run, name="gluonpar rendezvous", daemon=True).start()
            self._wakes = wakes
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                remaining = self._wakes - time.monotonic()
                if remaining > 0:
                    self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
                    continue
                self._wakes = float("inf")
            wakes = min((one.check() for one in list(_all)), default=float("inf"))
            with self._changed:
                self._wakes = min(self._wakes, wakes)


_watch = _Watch()


class _Closed(NamedTuple):
    """From ``at`` on no device waits for others, and ``why``."""

    at: float
    why: str


_closed: _Closed | None = None


def close(why: str, seconds: float = 0) -> bool:
    """Fail all rounds that lack a device in ``seconds``, and those to come.

    Returns whether there is any rendezvous.
    """
    global _closed
    _closed = _Closed(time.monotonic() + seconds, why)
    if not seconds:
        for rendezvous in list(_all):
            rendezvous.abandon(why)
    elif any(rendezvous.is_open() for rendezvous in list(_all)):
        _watch.notice(seconds)
    return bool(_all)


def reopen() -> None:
    """After :func:`close`, when no operator runs: start afresh."""
    global _closed
    _closed = None
    for rendezvous in list(_all):
        rendezvous.restart()


def _after_fork() -> None:
    """Start afresh: the thread that watches, and other threads' locks and rounds, are gone."""
    global _watch
    _watch = _Watch()
    for rendezvous in list(_all):
        rendezvous._forget()


atexit.register(close, "before the process ended", EXIT_SECONDS)  # no more will be called
os.register_at_fork(after_in_child=_after_fork)
