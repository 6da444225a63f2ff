"""Where one thread a device meets the others: each brings numbers, each leaves with their sum."""

from __future__ import annotations

import atexit
import collections
import threading
import weakref
from typing import Callable, Hashable

import numpy as np

_open: weakref.WeakSet[Meeting] = weakref.WeakSet()


class Late(RuntimeError):
    """Not all devices came to a meeting in time; the message names who did."""


class Meeting:
    """A place where ``num_devices()`` devices add up numbers, round after round.

    Each device comes on a thread of its own and waits there, at most ``timeout_seconds``.
    """

    def __init__(
        self, name: str, num_devices: Callable[[], int], timeout_seconds: float = 300
    ) -> None:
        self.name, self.num_devices, self.timeout_seconds = name, num_devices, timeout_seconds
        self._changed = threading.Condition()
        self._rounds: dict[Hashable, _Round] = {}
        self._begun: collections.Counter = collections.Counter()
        self._given_up = 0  # rounds that were begun when somebody was late; all start after them
        _open.add(self)

    def begin(self, device: str) -> int:
        """The number of this device's next round; the same for those that shall meet in it."""
        with self._changed:
            self._begun[device] += 1
            return self._given_up + self._begun[device]

    def sum(self, tag: Hashable, device: str, values: np.ndarray) -> np.ndarray:
        """The sum in float64 of what all devices bring to the round ``tag``; waits for them.

        The order of addition is that of the devices' names, not of their coming. Raises Late, for
        all that have come, if somebody has not in time; the next round starts afresh.
        """
        with self._changed:
            here = self._rounds.setdefault(tag, _Round())
            here.brought[device] = np.asarray(values, dtype=np.float64)
            if len(here.brought) >= self.num_devices():
                here.total = sum(here.brought[name] for name in sorted(here.brought))
                self._close(tag)
            elif not self._changed.wait_for(lambda: here.closed, self.timeout_seconds):
                self._give_up(tag, f"within {self.timeout_seconds:g} s")
            if here.total is None:
                raise Late(here.why)
            return here.total

    def restart(self) -> None:
        """Let all devices' next rounds be the same one, whoever has come to earlier ones."""
        with self._changed:
            self._start_after_all_begun()

    def abandon(self) -> None:
        """Let nobody wait any more: whoever does gets Late."""
        with self._changed:
            for tag in list(self._rounds):
                self._give_up(tag, "before the process ended")

    def _give_up(self, tag: Hashable, when: str) -> None:
        here = self._rounds[tag]
        here.why = (
            f"{self.name}: only {', '.join(sorted(here.brought))} came {when}, and "
            f"{self.num_devices()} devices are to meet. Run forward on all devices before reading "
            "any result, and backward likewise; with fewer, say so: set_num_devices(net, number)"
        )
        self._start_after_all_begun()
        self._close(tag)

    def _start_after_all_begun(self) -> None:
        self._given_up += max(self._begun.values(), default=0)
        self._begun.clear()

    def _close(self, tag: Hashable) -> None:
        self._rounds.pop(tag).closed = True
        self._changed.notify_all()


class _Round:
    def __init__(self) -> None:
        self.brought: dict[str, np.ndarray] = {}
        self.total: np.ndarray | None = None
        self.closed, self.why = False, ""


@atexit.register
def _abandon() -> None:
    """The process is not to wait for devices that will never come."""
    for meeting in list(_open):
        meeting.abandon()
