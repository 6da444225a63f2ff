"""A rendezvous of threads, one per device, where each returns with the sum of all values."""

from __future__ import annotations

import atexit
import collections
import threading
import weakref
from typing import Callable, Hashable

import numpy as np

_open: weakref.WeakSet[Rendezvous] = weakref.WeakSet()


class RendezvousTimeout(RuntimeError):
    """Not all devices arrived in time; the message names those that did."""


class Rendezvous:
    """Sums of numbers over ``num_devices()`` devices, round after round.

    Each device arrives on a thread of its own and waits there, at most ``timeout_seconds``.
    """

    def __init__(
        self, name: str, num_devices: Callable[[], int], timeout_seconds: float = 300
    ) -> None:
        self.name, self.num_devices, self.timeout_seconds = name, num_devices, timeout_seconds
        self._changed = threading.Condition()
        self._rounds: dict[Hashable, _Round] = {}
        self._begun: collections.Counter = collections.Counter()
        self._first_round = 0  # the rounds of a failed rendezvous are not used again
        _open.add(self)

    def begin(self, device: str) -> int:
        """Return the number of this device's next round, which is the same on all devices."""
        with self._changed:
            self._begun[device] += 1
            return self._first_round + self._begun[device]

    def sum(self, tag: Hashable, device: str, values: np.ndarray) -> np.ndarray:
        """Wait for all devices of the round ``tag`` and return the float64 sum of their values.

        Values are added in the order of the devices' names, whichever order they arrive in. Raises
        RendezvousTimeout, on all devices that have arrived, if one is missing after the timeout;
        the next round starts afresh.
        """
        with self._changed:
            round_ = self._rounds.setdefault(tag, _Round())
            round_.values[device] = np.asarray(values, dtype=np.float64)
            if len(round_.values) >= self.num_devices():
                round_.total = sum(round_.values[name] for name in sorted(round_.values))
                self._close(tag)
            elif not self._changed.wait_for(lambda: round_.closed, self.timeout_seconds):
                self._fail(tag, f"within {self.timeout_seconds:g} s")
            if round_.total is None:
                raise RendezvousTimeout(round_.error)
            return round_.total

    def restart(self) -> None:
        """Give all devices the same next round, however many each has taken part in."""
        with self._changed:
            self._start_after_all_begun()

    def abandon(self) -> None:
        """Make every device that waits raise RendezvousTimeout."""
        with self._changed:
            for tag in list(self._rounds):
                self._fail(tag, "before the process ended")

    def _fail(self, tag: Hashable, when: str) -> None:
        round_ = self._rounds[tag]
        round_.error = (
            f"{self.name}: of {self.num_devices()} devices only {', '.join(sorted(round_.values))} "
            f"arrived {when}. Run forward on all devices before reading any result, and backward "
            "likewise; for a step on fewer devices call set_num_devices(net, number)"
        )
        self._start_after_all_begun()
        self._close(tag)

    def _start_after_all_begun(self) -> None:
        self._first_round += max(self._begun.values(), default=0)
        self._begun.clear()

    def _close(self, tag: Hashable) -> None:
        self._rounds.pop(tag).closed = True
        self._changed.notify_all()


class _Round:
    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}
        self.total: np.ndarray | None = None
        self.closed, self.error = False, ""


@atexit.register
def _abandon_all() -> None:
    """Do not let the process wait for devices that can no longer arrive."""
    for rendezvous in list(_open):
        rendezvous.abandon()
