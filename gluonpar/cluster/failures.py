"""How a job ends when one of its ranks cannot go on, and what is printed when one is late.

A rank that is killed ends the job, through its launcher. But MPI waits for ever for a rank that
does not come to a collective, and does nothing about an exception: see :class:`FailureDetector`.
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
_TICK_SECONDS, _QUERY_SECONDS, _ANSWER_SECONDS = 0.5, 2.0, 5.0
_QUERY, _ANSWER = 1, 2  # tags of messages
_OUTSIDE = "outside gluonpar's collectives"
_MOST_NAMES = 4  # of late ranks in a line
# mpirun, told to end the job, waits for a host that is cut off until TCP gives up, a quarter of an
# hour: this kills it after 10 s. The ranks end with it.
_KILL_LAUNCHER = "sleep 10; grep -qx 'prterun\\|mpirun\\|orterun' /proc/$0/comm && kill -9 $0"


def time_limit(name: str = "GLUONPAR_TIMEOUT", default: float = 20.0) -> float:
    """Return the number of seconds in an environment variable, at least 2, or ``default``.

    After GLUONPAR_TIMEOUT a rank that does not respond ends the job, and a late one is named; after
    GLUONPAR_STALL_TIMEOUT (default: never) a late one ends the job, too.
    """
    value = os.environ.get(name, str(default))
    with contextlib.suppress(ValueError):
        if float(value) >= 2:
            return float(value)
    raise ValueError(f"{name} must be a number of seconds, at least 2, got {value!r}")


class _Place(NamedTuple):
    """Where a rank is."""

    number: int  # of collectives begun
    where: str  # the present collective, ENDED or _OUTSIDE


class FailureDetector:
    """Ends the job with one line on stderr after an exception, and if a rank does not respond.

    A thread of each rank counts the half seconds that the rank waits in its present collective.
    Time in which the process is stopped is not counted. After a second, one of the ranks that wait
    begins to send queries to all others, whose threads answer where they are. The job (all
    processes on all hosts) ends, by ``MPI_Abort``, if a rank has ended, or does not answer for
    ``seconds``. A rank that answers is waited for, up to ``most_seconds``, and named by a line
    after ``seconds``. Only this object uses ``comm``.
    """

    def __init__(
        self, mpi: Any, comm: Any, names: Sequence[str], seconds: float, most_seconds: float
    ) -> None:
        self.comm, self._mpi, self._names = comm, mpi, names
        self._seconds, self._most_seconds = seconds, most_seconds
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._place = _Place(0, _OUTSIDE)
        self._pid = os.getpid()
        self._begin(self._place)
        self._sent: list = []  # requests, which must live as long as the messages
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gluonpar.failures", daemon=True)
        self._thread.start()
        self._show, sys.excepthook = sys.excepthook, self._end_job

    @contextlib.contextmanager
    def operation(self, name: str) -> Iterator[int]:
        """Watch over the collective ``name``, or ENDED, while it waits. Yields its number."""
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
        self.abort_in_turn(f"failed: {line}")

    def abort_in_turn(self, why: str, rank: int | None = None) -> None:
        """:meth:`abort`, where all ranks may call it: the lowest ends the job."""
        time.sleep(self._turn_seconds())
        self.abort(why, rank)

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
        """Return how long this rank waits for a lower one to end the job with the same line."""
        return min(self.comm.rank, 4) / 2

    def _begin(self, place: _Place) -> None:
        """Begin to count the time in a new place."""
        self._watched, self._waited = place, 0.0
        self._queries_from = 1 + self._turn_seconds()  # by then another rank may send them
        self._next_query = 0.0
        self._told = False  # whether a line has named the late ranks
        self._answers: dict[int, _Place] = {}  # by rank
        self._unanswered: dict[int, float] = {}  # by rank, for how many seconds

    def _run(self) -> None:
        while not self._stop.wait(_TICK_SECONDS):
            place = self._place
            if place != self._watched:
                self._begin(place)
            self._receive()
            if place.where != _OUTSIDE:
                self._watch()

    def _watch(self) -> None:
        """Count half a second. Query the other ranks, unless another rank does."""
        self._waited += _TICK_SECONDS
        for rank in self._unanswered:
            self._unanswered[rank] += _TICK_SECONDS
        if self._waited < self._queries_from:
            return
        if self._waited >= self._next_query:
            self._next_query = self._waited + _QUERY_SECONDS
            if self._waited < self._seconds < self._next_query:
                self._next_query = self._seconds  # what the line says is new
            self._query()
        limit, (number, where) = max(self._seconds, _ANSWER_SECONDS), self._watched
        for rank, seconds in self._unanswered.items():
            if seconds >= limit + self._turn_seconds():
                self._abort_here(
                    f"has not responded for {limit:g} s (it is stopped, or its machine or "
                    f"network is down), and {where} waits for it",
                    rank,
                )
        if where == ENDED:  # the others may go on as long as they like
            return
        late = [
            (rank, place)
            for rank, place in sorted(self._answers.items())
            if place.number < number or place == (number, ENDED)
        ]
        for rank, place in late:
            if place.where == ENDED:
                self._abort_here(f"{HAS_ENDED}, and {where} waits for it", rank)
            if self._waited >= self._most_seconds + self._turn_seconds():
                self._abort_here(
                    f"has not come to {where} in {self._most_seconds:g} s "
                    f"(GLUONPAR_STALL_TIMEOUT): it is {_words(place)}",
                    rank,
                )
        if self._waited >= self._seconds and not self._told and not self._unanswered:
            self._told = True
            self._name([f"{self._names[rank]}, which is {_words(place)}" for rank, place in late])

    def _name(self, late: list[str]) -> None:
        """Print which ranks are late."""
        if len(late) > _MOST_NAMES:
            late[_MOST_NAMES:] = [f"{len(late) - _MOST_NAMES} more ranks"]
        where, seconds = self._watched.where, f"{self._waited:g} s"
        line = f"gluonpar: {where} has waited {seconds} for {'; '.join(late)}"
        if not late:
            line = f"gluonpar: {where} has taken {seconds}, and all ranks are there, as on a slow "
            line += "network"
        if self._place == self._watched:
            print(f"{line}; all ranks respond, and the job goes on", file=sys.stderr, flush=True)

    def _abort_here(self, why: str, rank: int) -> None:
        """End the job, unless this rank has left the place where ``why`` was found."""
        if self._place == self._watched:
            self.abort(why, rank)

    def _query(self) -> None:
        for rank in self._others:
            if rank not in self._unanswered:
                self._unanswered[rank] = 0.0
                self._sent.append(self.comm.isend((self._watched, self._told), rank, _QUERY))

    def _receive(self) -> None:
        """Receive the messages that have come, and answer queries."""
        self._sent = [request for request in self._sent if not request.Test()]
        status = self._mpi.Status()
        while self.comm.iprobe(status=status):
            message, rank = self.comm.recv(source=status.source, tag=status.tag), status.source
            if status.tag == _ANSWER:
                self._answers[rank] = message
                self._unanswered.pop(rank, None)
                continue
            self._sent.append(self.comm.isend(self._place, rank, _ANSWER))
            place, told = message
            sends = self._waited >= self._queries_from
            if place == self._watched and (rank < self.comm.rank or not sends):
                self._told |= told
                self._unanswered.clear()
                self._queries_from = self._waited + 2 * _QUERY_SECONDS + self._turn_seconds()


def _words(place: _Place) -> str:
    return place.where if place.where == _OUTSIDE else f"in {place.where}"
