"""Ending a run in order when a signal asks for it: one process, or several at the same step."""

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
        """Within this context the first SIGTERM requests the end; the second has its usual effect.

        With several processes only if one of them ``saves``; otherwise SIGTERM kills this rank, and
        that ends the job. SIGUSR1, too: mpirun passes it on to all ranks and waits, while after a
        SIGTERM it kills them a quarter of a second later.
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
        """Return whether the run is to end now; all processes must call this, and get the same.

        Their requests are summed asynchronously; the sum is read ``delay`` calls later.
        """
        if cluster.size() == 1:
            return self._requested
        requests = staging.from_numpy(np.array([self._requested], "float32"), mx.cpu(0))
        cluster.allreduce([requests])
        self._in_flight.append(requests)
        while len(self._in_flight) > delay:
            self._is_due |= bool(self._in_flight.popleft().asscalar() > 0)
        return self._is_due
