"""How a job ends when one of its ranks cannot go on.

A killed rank is noticed by its launcher, which ends the job. But MPI waits for ever for a rank that
does not come to a collective, and does nothing about an exception: see :class:`FailureDetector`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from typing import Any, Callable, Iterator, Sequence

FAILED = 1  # exit code
_TICK_SECONDS, _ANSWER_SECONDS = 0.5, 5.0
_QUERY, _ANSWER = 1, 2  # tags of messages
_OUTSIDE, _ENDED = "it is outside gluonpar's collectives", "its program has ended"
_SILENT = "it does not respond (killed or stopped, or its machine or network is down)"
# mpirun, told to end the job, waits for a host that is cut off until TCP gives up, a quarter of an
# hour: this kills it after 10 s. The ranks end with it.
_KILL_LAUNCHER = "sleep 10; grep -qx 'prterun\\|mpirun\\|orterun' /proc/$0/comm && kill -9 $0"


def time_limit() -> float:
    """Return how many seconds a collective may take: ``GLUONPAR_TIMEOUT``, at least 2, or 20."""
    value = os.environ.get("GLUONPAR_TIMEOUT", "20")
    with contextlib.suppress(ValueError):
        if float(value) >= 2:
            return float(value)
    raise ValueError(f"GLUONPAR_TIMEOUT must be a number of seconds, at least 2, got {value!r}")


class FailureDetector:
    """Ends the job with one line on stderr after an exception or a collective that takes too long.

    A thread of each rank counts the half seconds that the rank spends in its present collective.
    Time in which the process does not run, because it is stopped, is not counted. Beyond
    ``seconds`` the thread sends a query to all other ranks, whose threads answer which collective
    they are in. It prints which rank is missing, and ends the processes on all hosts with
    ``MPI_Abort``. ``comm`` is a communicator for this alone.
    """

    def __init__(self, mpi, comm, names: Sequence[str], seconds: float) -> None:
        self.comm, self._mpi = comm, mpi
        self._names, self._seconds = names, seconds
        self._number = 0  # of collectives begun
        self._place = _OUTSIDE  # or the present collective
        self._ended, self._pid = False, os.getpid()
        self._answers: dict[int, str] = {}  # by rank, to this rank's last query
        self._sent: list = []  # requests, which must live as long as the messages
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gluonpar.failures", daemon=True)
        self._thread.start()
        self._show, sys.excepthook = sys.excepthook, self._end_job

    @contextlib.contextmanager
    def operation(self, name: str) -> Iterator[int]:
        """Apply the time limit to the collective ``name``. Yields its number."""
        self._number += 1
        self._place = f"operation {self._number} ({name})"
        try:
            yield self._number
        finally:
            self._place = _OUTSIDE

    def wait_at_exit(self, barrier: Callable[[Any], None]) -> None:
        """Call ``barrier(comm)``, which may take any time while all ranks answer."""
        self._place, self._ended = _ENDED, True
        barrier(self.comm)
        self._stop.set()
        self._thread.join()

    def _end_job(self, kind: type, error: BaseException, trace: Any) -> None:
        """End the job after an exception that has ended the program of this rank."""
        self._show(kind, error, trace)
        if os.getpid() != self._pid:  # in a fork of the rank, which ends alone
            return
        time.sleep(self._turn_seconds())  # if all ranks fail, rank 0 ends the job
        line = traceback.format_exception_only(kind, error)[-1].strip().splitlines()[-1]
        self.abort(f"failed: {line}")

    def abort(self, why: str, rank: int | None = None) -> None:
        """End the job: ``why`` completes the line that begins "rank 1 (...)". Does not return."""
        name = self._names[self.comm.rank if rank is None else rank]
        sys.stdout.flush()
        print(f"gluonpar: {name} {why}; the job ends", file=sys.stderr, flush=True)
        # Spawned, because a fork waits for all operators of MXNet, also for the one that waits.
        quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
        command = ["sh", "-c", _KILL_LAUNCHER, str(os.getppid())]
        os.posix_spawn("/bin/sh", command, os.environ, file_actions=quiet, setsid=True)
        self._mpi.COMM_WORLD.Abort(FAILED)

    def _turn_seconds(self) -> float:
        """How long this rank leaves it to lower ones to end the job with the same line."""
        return min(self.comm.rank, 4) / 2

    def _run(self) -> None:
        place, waited = _OUTSIDE, 0.0
        while not self._stop.wait(_TICK_SECONDS):
            self._receive()
            waited = waited + _TICK_SECONDS if self._place == place else 0.0
            place = self._place
            if place != _OUTSIDE and waited > self._seconds:
                self._find_missing(place)
                waited = 0.0

    def _find_missing(self, place: str) -> None:
        """Query all other ranks; end the job unless this rank leaves ``place`` meanwhile."""
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        self._answers = {}
        self._sent += [self.comm.isend(None, rank, _QUERY) for rank in others]
        polls = int(_ANSWER_SECONDS / _TICK_SECONDS)
        while polls and len(self._answers) < len(others):
            self._stop.wait(_TICK_SECONDS)
            self._receive()
            polls -= 1
        if self._stop.wait(self._turn_seconds()) or self._place != place:
            return
        late = f"did not complete {'its program' if self._ended else place} in {self._seconds:g} s"
        for rank in others:
            if rank not in self._answers:
                self.abort(f"{late}: {_SILENT}", rank)
        if self._ended:  # the other ranks may go on as long as they like
            return
        for rank in others:
            if self._answers[rank] != place:
                self.abort(f"{late}: {self._answers[rank]}", rank)
        self.abort(f"{late}, and all other ranks are there too: is the network too slow?")

    def _receive(self) -> None:
        """Receive and answer the messages that have come. Only this object's thread receives."""
        status = self._mpi.Status()
        while self.comm.iprobe(status=status):
            message = self.comm.recv(source=status.source, tag=status.tag)
            if status.tag == _ANSWER:
                self._answers[status.source] = message
            else:
                self._sent.append(self.comm.isend(self._place, status.source, _ANSWER))
