"""The failure detector: ends a job when a rank has failed, and names ranks that are late.

When a rank is killed, the launcher ends the job. But MPI waits for ever for a rank that does not
come to a collective, and an exception in one rank does not end the others.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from typing import Any, Iterator, NamedTuple, Sequence

FAILED = 1  # exit code
ENDED = "the end of the program"
HAS_ENDED = "has ended its program"
_TICK_SECONDS, _SILENT_SECONDS, _ANSWER_SECONDS = 0.5, 2.0, 5.0
_OUTSIDE = "outside gluonpar's collectives"
# After MPI_Abort mpirun waits for an unreachable host until TCP gives up, for a quarter of an hour.
# This kills mpirun after 10 s, and the ranks with it.
_KILL_LAUNCHER = "sleep 10; grep -qx 'prterun\\|mpirun\\|orterun' /proc/$0/comm && kill -9 $0"


def time_limit(name: str = "GLUONPAR_TIMEOUT", default: float = 20.0) -> float:
    """Return the number of seconds in an environment variable, at least 2, or ``default``."""
    value = os.environ.get(name, str(default))
    with contextlib.suppress(ValueError):
        if float(value) >= 2:
            return float(value)
    raise ValueError(f"{name} must be a number of seconds, at least 2, got {value!r}")


class _Place(NamedTuple):
    number: int  # of collectives begun
    where: str  # the present collective, ENDED or _OUTSIDE


class FailureDetector:
    """Ends the job with one line on stderr after an exception, and if a rank does not respond.

    Twice a second a thread of each rank sends a heartbeat, the rank's place, to rank 0, and rank 0
    sends its own to all. Rank 0 watches all ranks, and they watch rank 0. Each counts the half
    seconds in which it runs itself, so time in which its process is stopped does not count.

    While a rank waits in a collective, the job (all processes on all hosts) ends, by ``MPI_Abort``,
    if another rank has ended its program, or has sent nothing for ``seconds``. A late rank that
    sends heartbeats is named on stderr after ``seconds``, and ends the job after ``most_seconds``.
    Only this object uses ``comm``.
    """

    def __init__(
        self, mpi: Any, comm: Any, names: Sequence[str], seconds: float, most_seconds: float
    ) -> None:
        self.comm, self._mpi, self._names = comm, mpi, names
        self._seconds, self._most_seconds = seconds, most_seconds
        self._pid, self._place = os.getpid(), _Place(0, _OUTSIDE)
        self._partners = range(1, comm.size) if comm.rank == 0 else [0]
        self._sent: dict[int, Any] = {}  # by rank: the request, which must live as long as its data
        # By rank, for this one and its partners: the place, for how many seconds it has been the
        # same place in a collective, and for how many seconds nothing has come from the rank.
        self._places = {rank: self._place for rank in (comm.rank, *self._partners)}
        self._stay = dict.fromkeys(self._places, 0.0)
        self._silent = dict.fromkeys(self._places, 0.0)
        self._told: _Place | None = None  # the collective for which a line has named late ranks
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gluonpar.failures", daemon=True)
        self._thread.start()
        self._show, sys.excepthook = sys.excepthook, self._end_job

    @contextlib.contextmanager
    def operation(self, name: str) -> Iterator[int]:
        """Say in the heartbeats that this rank is in collective ``name``; yields its number."""
        number = self._place.number + 1
        where = name if name == ENDED else f"operation {number} ({name})"
        self._place = _Place(number, where)
        try:
            yield number
        finally:
            self._place = _Place(number, _OUTSIDE)

    def stop(self) -> None:
        """End the thread, before MPI is finalized."""
        self._stop.set()
        self._thread.join()

    def _end_job(self, kind: type, error: BaseException, trace: Any) -> None:
        """End the job after an exception that has ended the program of this rank."""
        self._show(kind, error, trace)
        if os.getpid() != self._pid or self._stop.is_set():  # in a fork, or after MPI.Finalize()
            return
        line = traceback.format_exception_only(kind, error)[-1].strip().splitlines()[-1]
        self.abort(f"failed: {line}")

    def abort(self, why: str, rank: int | None = None) -> None:
        """End the job: ``why`` completes the line that begins "rank 1 (...)". Does not return."""
        time.sleep(min(self.comm.rank, 4) / 2)  # of several ranks the lowest ends the job
        name = self._names[self.comm.rank if rank is None else rank]
        sys.stdout.flush()
        print(f"gluonpar: {name} {why}; the job ends", file=sys.stderr, flush=True)
        # Spawned: a fork would wait for all operators of MXNet, also for the present collective.
        quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
        command = ["sh", "-c", _KILL_LAUNCHER, str(os.getppid())]
        os.posix_spawn("/bin/sh", command, os.environ, file_actions=quiet, setsid=True)
        self._mpi.COMM_WORLD.Abort(FAILED)

    def _run(self) -> None:
        while not self._stop.wait(_TICK_SECONDS):
            for rank in self._partners:
                if rank not in self._sent or self._sent[rank].Test():
                    self._sent[rank] = self.comm.isend(self._place, rank)
            self._receive()
            self._judge()

    def _receive(self) -> None:
        """Receive the partners' places, and count half a second."""
        status, received = self._mpi.Status(), {self.comm.rank: self._place}
        while self.comm.iprobe(status=status):
            received[status.source] = self.comm.recv(source=status.source)
        for rank, before in self._places.items():
            self._places[rank] = received.get(rank, before)
            stays = self._places[rank] == before and before.where != _OUTSIDE
            self._stay[rank] = self._stay[rank] + _TICK_SECONDS if stays else 0.0
            self._silent[rank] = 0.0 if rank in received else self._silent[rank] + _TICK_SECONDS

    def _judge(self) -> None:
        """End the job, or name late ranks, for the rank that has waited longest."""
        waiting = [rank for rank, silent in self._silent.items() if silent < _SILENT_SECONDS]
        longest = max(waiting, key=self._stay.__getitem__)
        where, limit = self._places[longest].where, max(self._seconds, _ANSWER_SECONDS)
        for rank, silent in self._silent.items():
            if min(silent, self._stay[longest]) >= limit:
                self.abort(
                    f"has not responded for {limit:g} s (it is stopped, or its machine or "
                    f"network is down), and {where} waits for it",
                    rank,
                )
        # A rank that has reached the end of its program waits for the others without a limit.
        waiting = [rank for rank in waiting if self._places[rank].where != ENDED]
        if self.comm.rank or not waiting:
            return
        longest = max(waiting, key=self._stay.__getitem__)
        (number, where), seconds = self._places[longest], self._stay[longest]
        if seconds < 2 * _TICK_SECONDS:  # all ranks may be there, and may not have sent it yet
            return
        late = {
            rank: place
            for rank, place in self._places.items()
            if place.number < number or place == (number, ENDED)
        }
        for rank, place in late.items():
            if place.where == ENDED:
                self.abort(f"{HAS_ENDED}, and {where} waits for it", rank)
            if seconds >= self._most_seconds:
                self.abort(
                    f"has not come to {where} in {self._most_seconds:g} s "
                    f"(GLUONPAR_STALL_TIMEOUT): it is {_words(place)}",
                    rank,
                )
        respond = max(self._silent.values()) < _SILENT_SECONDS
        if late and respond and seconds >= self._seconds and self._told != (number, where):
            self._told = self._places[longest]
            names = "; ".join(f"{self._names[i]}, which is {_words(late[i])}" for i in late)
            line = f"gluonpar: {where} has waited {seconds:g} s for {names}"
            print(f"{line}; all ranks respond, and the job goes on", file=sys.stderr, flush=True)


def _words(place: _Place) -> str:
    return place.where if place.where == _OUTSIDE else f"in {place.where}"
