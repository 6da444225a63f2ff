"""Ending a run in order when a signal asks for it: one process, or several at the same step."""

from __future__ import annotations

from collections import deque

import mxnet as mx
import numpy as np

from gluonpar import cluster
from gluonpar.runtime import memory


class Terminated(Exception):
    """The run has ended before its last epoch because SIGTERM requested it."""


class Termination:
    """A request to end the run, on which all processes agree at the same step."""

    def __init__(self) -> None:
        self._requested, self._agreed = False, False
        self._in_flight: deque[mx.nd.NDArray] = deque()

    def request(self) -> None:
        """Request the end of the run. One process is enough. May be called by a signal handler."""
        self._requested = True

    def agreed(self, delay: int = 0) -> bool:
        """Return whether the run is to end now. All processes must call this, and agree.

        The requests of several processes are summed asynchronously, and the sum is read ``delay``
        calls later, when it has arrived.
        """
        if cluster.size() == 1:
            return self._requested
        requests = memory.from_numpy(np.array([self._requested], "float32"), mx.cpu(0))
        cluster.allreduce([requests])
        self._in_flight.append(requests)
        while len(self._in_flight) > delay:
            self._agreed |= bool(self._in_flight.popleft().asscalar() > 0)
        return self._agreed
