"""Ending a run after a signal such that it can be resumed: all processes at the same step."""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from typing import Any, Iterator

import mxnet as mx
import numpy as np

from gluonpar import cluster
from gluonpar.runtime import staging


class Terminated(Exception):
    """The run has ended before its last epoch because SIGTERM requested it."""


class Termination:
    """A request to end the run; all processes end it at the same step."""

    def __init__(self) -> None:
        self._requested = self._is_due = False
        self._in_flight: deque[mx.nd.NDArray] = deque()

    @contextlib.contextmanager
    def by_signal(self, saves: bool) -> Iterator[None]:
        """In this context the first SIGTERM requests the end; a second one has its usual effect.

        In a job this is so only if a rank ``saves``; otherwise SIGTERM kills this rank, and so ends
        the job. SIGUSR1 requests the end of a job, too: mpirun passes it on to all ranks and waits,
        while it kills the ranks a quarter of a second after a SIGTERM.
        """
        signals = [signal.SIGTERM]
        if cluster.size() > 1:
            signals = [signal.SIGTERM, signal.SIGUSR1] if saves else []

        def request(number: int, _: Any) -> None:
            signal.signal(number, before[number])
            self._requested = True

        before: dict[int, Any] = {number: signal.signal(number, request) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def is_due(self, delay: int = 0) -> bool:
        """Return whether the run is to end now: the same on all processes, which must call this.

        The requests are summed asynchronously; the sum is read ``delay`` calls later.
        """
        if cluster.size() == 1:
            return self._requested
        requests = staging.from_numpy(np.array([self._requested], "float32"), mx.cpu(0))
        cluster.allreduce([requests])
        self._in_flight.append(requests)
        while len(self._in_flight) > delay:
            self._is_due |= bool(self._in_flight.popleft().asscalar() > 0)
        return self._is_due
