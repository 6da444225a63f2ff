"""A rendezvous of threads, one per device, where each returns with the sum of all values."""

from __future__ import annotations

import atexit
import collections
import itertools
import threading
import weakref
from concurrent import futures
from typing import Callable, Hashable

import numpy as np

by_key: weakref.WeakValueDictionary[str, Rendezvous] = weakref.WeakValueDictionary()
_keys = map(str, itertools.count())


class RendezvousTimeout(RuntimeError):
    """Not all devices arrived in time; the message names those that did."""


class Rendezvous:
    """Sums of numbers over ``num_devices()`` devices, round after round.

    Each device arrives on a thread of its own and waits there, at most ``timeout_seconds``.
    ``by_key[key]`` is this object while it exists.
    """

    def __init__(
        self, name: str, num_devices: Callable[[], int], timeout_seconds: float = 300
    ) -> None:
        self.name, self.num_devices, self.timeout_seconds = name, num_devices, timeout_seconds
        self.key = next(_keys)
        self._lock = threading.RLock()
        self._rounds: dict[Hashable, tuple[dict[str, np.ndarray], futures.Future]] = {}
        self._begun: collections.Counter = collections.Counter()
        self._first_round = 0  # the rounds of a failed rendezvous are not used again
        by_key[self.key] = self

    def begin(self, device: str) -> int:
        """Return the number of this device's next round, which is the same on all devices."""
        with self._lock:
            self._begun[device] += 1
            return self._first_round + self._begun[device]

    def sum(self, tag: Hashable, device: str, values: np.ndarray) -> np.ndarray:
        """Wait for all devices of the round ``tag`` and return the float64 sum of their values.

        Values are added in the order of the devices' names, whichever order they arrive in. Raises
        RendezvousTimeout, on all devices that have arrived, if one is missing after the timeout;
        the next round starts afresh.
        """
        with self._lock:
            arrived, total = self._rounds.setdefault(tag, ({}, futures.Future()))
            arrived[device] = np.asarray(values, dtype=np.float64)
            if len(arrived) >= self.num_devices():
                del self._rounds[tag]
                total.set_result(sum(arrived[name] for name in sorted(arrived)))
        try:
            return total.result(self.timeout_seconds)
        except futures.TimeoutError:
            with self._lock:
                if not total.done():
                    self._fail(tag, f"within {self.timeout_seconds:g} s")
        return total.result()

    def restart(self) -> None:
        """Give all devices the same next round, however many each has taken part in."""
        with self._lock:
            self._first_round += max(self._begun.values(), default=0)
            self._begun.clear()

    def abandon(self) -> None:
        """Make every device that waits raise RendezvousTimeout."""
        with self._lock:
            for tag in list(self._rounds):
                self._fail(tag, "before the process ended")

    def _fail(self, tag: Hashable, when: str) -> None:
        arrived, total = self._rounds.pop(tag)
        self.restart()
        message = (
            f"{self.name}: of {self.num_devices()} devices only {', '.join(sorted(arrived))} "
            f"arrived {when}. Run forward on all devices before reading any result, and "
            "backward likewise; for a step on fewer devices call set_num_devices(net, number)"
        )
        total.set_exception(RendezvousTimeout(message))


@atexit.register
def _abandon_all() -> None:
    """Do not let the process wait for devices that can no longer arrive."""
    for rendezvous in list(by_key.values()):
        rendezvous.abandon()
