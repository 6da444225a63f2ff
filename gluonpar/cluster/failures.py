"""The failure detector: ends a job when a rank has failed, and names ranks that are late.

When a rank is killed, the launcher ends the job. But MPI waits for ever for a rank that does not
come to a collective, and an exception in one rank does not end the others.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import threading
import time
import traceback
from typing import Any, Iterator, NamedTuple, Sequence

FAILED = 1  # exit code
ENDED = "the end of the program"
HAS_ENDED = "has ended its program"
_TICK_SECONDS, _SILENT_SECONDS, _ANSWER_SECONDS, _ABORT_SECONDS = 0.5, 2.0, 5.0, 120.0
_OUTSIDE, _ABORTS = "outside gluonpar's collectives", "the end of the job"
# After MPI_Abort mpirun waits for a quarter of an hour for an unreachable host, until TCP gives up.
# This command kills mpirun after 10 s, and the ranks with it.
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
    where: str  # the present collective, ENDED, _OUTSIDE or _ABORTS

    def __str__(self) -> str:
        return self.where if self.where == _OUTSIDE else f"in {self.where}"


class _Watched:
    """A rank's place, and for how many seconds it has stayed in a collective, and been silent."""

    def __init__(self, place: _Place) -> None:
        self.place, self.stay, self.silent = place, 0.0, 0.0

    def tick(self, heartbeat: _Place | None) -> None:
        """Count half a second, in which the rank has sent ``heartbeat``, or nothing."""
        before, self.place = self.place, heartbeat or self.place
        stays = self.place == before and before.where != _OUTSIDE
        self.stay = self.stay + _TICK_SECONDS if stays else 0.0
        self.silent = 0.0 if heartbeat else self.silent + _TICK_SECONDS


class FailureDetector:
    """Ends the job with one line on stderr after an exception, and if a rank does not respond.

    Twice a second a thread of each rank sends a heartbeat, the rank's place, to rank 0, and rank 0
    sends its own to all. Rank 0 watches all ranks, and they watch rank 0. Each counts the half
    seconds in which it runs itself, so time in which its process is stopped does not count.

    While a rank waits in a collective, the job (all processes on all hosts) ends, by ``MPI_Abort``,
    if another rank has ended its program, or has sent nothing for ``seconds``. A late rank that
    sends heartbeats is named on stderr after ``seconds``, and ends the job after ``most_seconds``.
    A rank that ends the job says so in a last heartbeat, as the launcher may need some seconds.
    Only this object uses ``comm``.
    """

    def __init__(
        self, mpi: Any, comm: Any, names: Sequence[str], seconds: float, most_seconds: float
    ) -> None:
        self.comm, self._mpi, self._names = comm, mpi, names
        self._seconds, self._most_seconds = seconds, most_seconds
        self._pid, self._place = os.getpid(), _Place(0, _OUTSIDE)
        self._partners = range(1, comm.size) if comm.rank == 0 else [0]
        self._sent: dict[int, Any] = {}  # by rank: a request, which keeps its data alive
        self._watched = {rank: _Watched(self._place) for rank in (comm.rank, *self._partners)}
        self._told: _Place | None = None  # the collective for which late ranks were named last
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gluonpar.failures", daemon=True)
        self._thread.start()
        self._show, sys.excepthook = sys.excepthook, self._end_job

    @contextlib.contextmanager
    def operation(self, name: str) -> Iterator[int]:
        """Say in the heartbeats that this rank is in collective ``name``; yield its number."""
        number = self._place.number + 1
        self._place = _Place(number, name if name == ENDED else f"operation {number} ({name})")
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
        time.sleep(min(self.comm.rank, 4) / 2)  # if several ranks do, the lowest ends the job
        name = self._names[self.comm.rank if rank is None else rank]
        sys.stdout.flush()
        print(f"gluonpar: {name} {why}; the job ends", file=sys.stderr, flush=True)
        self._place = self._place._replace(where=_ABORTS)
        self._last_sent = [self.comm.isend(self._place, partner) for partner in self._partners]
        # A fork would wait for all operators of MXNet, among them the present collective.
        quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
        command = ["sh", "-c", _KILL_LAUNCHER, str(os.getppid())]
        os.posix_spawn("/bin/sh", command, os.environ, file_actions=quiet, setsid=True)
        self._mpi.COMM_WORLD.Abort(FAILED)

    def _run(self) -> None:
        while not self._stop.wait(_TICK_SECONDS):
            for rank in self._partners:
                if rank not in self._sent or self._sent[rank].Test():
                    self._sent[rank] = self.comm.isend(self._place, rank)
            status, received = self._mpi.Status(), {self.comm.rank: self._place}
            while self.comm.iprobe(status=status):
                received[status.source] = self.comm.recv(source=status.source)
            for rank, watched in self._watched.items():
                watched.tick(received.get(rank))
            self._judge()

    def _judge(self) -> None:
        """Judge the ranks that are watched, for the rank that has waited longest."""
        ending = [each for each in self._watched.values() if each.place.where == _ABORTS]
        if any(each.silent < _ABORT_SECONDS for each in ending):
            return
        stay = operator.attrgetter("stay")
        waiting = [each for each in self._watched.values() if each.silent < _SILENT_SECONDS]
        self._judge_silent(max(waiting, key=stay))
        # A rank that has reached the end of its program waits for the others without a limit.
        waiting = [each for each in waiting if each.place.where != ENDED]
        if self.comm.rank == 0 and waiting:
            self._judge_late(max(waiting, key=stay))

    def _judge_silent(self, waiting: _Watched) -> None:
        """End the job if ``waiting`` waits and a rank has sent nothing for too long."""
        limit = max(self._seconds, _ANSWER_SECONDS)
        for rank, watched in self._watched.items():
            if min(watched.silent, waiting.stay) >= limit:
                self.abort(
                    f"has not responded for {limit:g} s (it is stopped, or its machine or "
                    f"network is down), and {waiting.place.where} waits for it",
                    rank,
                )

    def _judge_late(self, waiting: _Watched) -> None:
        """Name the ranks that have not come to where ``waiting`` waits, or end the job for them."""
        (number, where), seconds = waiting.place, waiting.stay
        if seconds < 2 * _TICK_SECONDS:  # all ranks may be there, and may not have sent it yet
            return
        late = {
            rank: watched.place
            for rank, watched in self._watched.items()
            if watched.place.number < number or watched.place == (number, ENDED)
        }
        for rank, place in late.items():
            if place.where == ENDED:
                self.abort(f"{HAS_ENDED}, and {where} waits for it", rank)
            if seconds >= self._most_seconds:
                limit = f"{self._most_seconds:g} s (GLUONPAR_STALL_TIMEOUT)"
                self.abort(f"has not come to {where} in {limit}: it is {place}", rank)
        respond = all(watched.silent < _SILENT_SECONDS for watched in self._watched.values())
        if late and respond and seconds >= self._seconds and self._told != waiting.place:
            self._told = waiting.place
            names = "; ".join(f"{self._names[i]}, which is {place}" for i, place in late.items())
            line = f"gluonpar: {where} has waited {seconds:g} s for {names}"
            print(f"{line}; all ranks respond, and the job goes on", file=sys.stderr, flush=True)
