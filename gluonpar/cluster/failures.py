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
# A rank that calls the roll waits so long for answers, and so much longer for another rank that
# will end the job, or has said so: on a machine with much else to do that may take a while (half a
# minute was measured for the start of a process beside 27 ranks that wait in MPI on two cores).
# It also waits longer if it has itself not run for a while: the others may not run again yet.
_TICK_SECONDS, _ROLL_SECONDS, _MORE_SECONDS = 0.5, 3.0, 30.0
# The thread that comes to its next check later than this has itself not run: that does not count.
_STILL_SECONDS = 2.0
_QUERY, _ANSWER, _ENDING = 1, 2, 3  # tags of messages
_SILENT = "it does not respond (killed or stopped, or its machine or network is down)"
# mpirun, told to end the job, waits for a host that is cut off until TCP gives up, a quarter of an
# hour: this kills it after 10 s. The ranks end with it.
_KILL_LAUNCHER = "sleep 10; grep -qx 'prterun\\|mpirun\\|orterun' /proc/$0/comm && kill -9 $0"


def time_limit() -> float:
    """Return how many seconds a collective may take: ``GLUONPAR_TIMEOUT``, at least 2, or 20."""
    text = os.environ.get("GLUONPAR_TIMEOUT", "20")
    with contextlib.suppress(ValueError):
        if float(text) >= 2:
            return float(text)
    raise ValueError(f"GLUONPAR_TIMEOUT must be a number of seconds, at least 2, got {text!r}")


class FailureDetector:
    """Ends the job with one line on stderr after an exception or a collective that takes too long.

    A thread of each rank checks twice a second how long the rank has been in its present
    collective. Beyond ``seconds`` it calls the roll: it sends a query to all other ranks, whose
    threads answer where they are; a process that is stopped or cut off does not answer. The lowest
    rank that waits prints what it found, and ends the processes on all hosts with ``MPI_Abort``,
    which may take seconds. It tells the others before: if it takes too long one of them ends the
    job, but prints nothing. Time in which this process did not run, because the job was stopped for
    a while or its machine was suspended, does not count, and others get longer to answer then.

    ``comm`` is a communicator for this alone. If a thread does not return from MPI with
    ``mpi_lock`` held, this one calls MPI at the same time where that is allowed (THREAD_MULTIPLE),
    and otherwise cannot call the roll.
    """

    def __init__(self, mpi, comm, mpi_lock, names: Sequence[str], seconds: float) -> None:
        self.comm, self._mpi, self._mpi_lock = comm, mpi, mpi_lock
        self._names, self._seconds = names, seconds
        self._number, self._operation = 0, ""  # the last collective begun
        self._since: float | None = None  # when it, or the wait at exit, began; None: it is done
        self._ended, self._in_fork = False, False
        self._checked, self._still = time.monotonic(), 0.0  # last check; seconds that do not count
        self._query = -1  # the operation for which a rank last called the roll
        self._answers: dict[int, str] = {}
        self._ending = False  # whether another rank has said that it ends the job
        self._sent: list = []  # requests, which must live as long as the messages
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gluonpar.failures", daemon=True)
        self._thread.start()
        self._show, sys.excepthook = sys.excepthook, self._end_job

    @contextlib.contextmanager
    def operation(self, what: str) -> Iterator[int]:
        """Apply the time limit to the collective ``what``. Yields its number."""
        self._number += 1
        self._operation = f"operation {self._number} ({what})"
        self._since = self._time()
        try:
            yield self._number
        finally:
            self._since = None

    def wait_at_exit(self, meet: Callable[[Any], None]) -> None:
        """Call ``meet(comm)``, which may take any time while all ranks answer."""
        self._operation, self._ended, self._since = "its program", True, self._time()
        meet(self.comm)
        self._stop.set()
        self._thread.join()

    def stop_in_fork(self) -> None:
        """Let an exception in this process, which was forked from a rank, end it alone."""
        self._in_fork = True

    def _end_job(self, kind: type, error: BaseException, trace: Any) -> None:
        """End the job after an exception that has ended the program of this rank."""
        self._show(kind, error, trace)
        if self._in_fork:
            return
        time.sleep(min(self.comm.rank, 4) / 2)  # if all ranks fail, rank 0 ends the job
        line = traceback.format_exception_only(kind, error)[-1].strip().splitlines()[-1]
        self.abort(f"failed: {line}")

    def abort(self, why: str, rank: int | None = None) -> None:
        """End the job: ``why`` completes the line that begins "rank 1 (...)". Does not return.

        Prints nothing if another rank has said that it ends the job.
        """
        if not self._ending:
            with contextlib.suppress(self._mpi.Exception), self._turn() as allowed:
                if allowed:  # the job ends also if the others cannot be told
                    self._send(self._others(), _ENDING)
            name = self._names[self.comm.rank if rank is None else rank]
            sys.stdout.flush()
            print(f"gluonpar: {name} {why}; the job ends", file=sys.stderr, flush=True)
        # Spawned, because a fork waits for all operators of MXNet, also for the one that waits.
        quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
        command = ["sh", "-c", _KILL_LAUNCHER, str(os.getppid())]
        os.posix_spawn("/bin/sh", command, os.environ, file_actions=quiet, setsid=True)
        self._mpi.COMM_WORLD.Abort(FAILED)

    def _time(self) -> float:
        return time.monotonic() - self._still

    def _wait(self, seconds: float) -> bool:
        """Wait; return whether to stop."""
        stop, now = self._stop.wait(seconds), time.monotonic()
        self._still += max(0.0, now - self._checked - _STILL_SECONDS)
        self._checked = now
        return stop

    def _run(self) -> None:
        while not self._wait(_TICK_SECONDS):
            self._exchange()
            since, now = self._since, self._time()
            if since and (now - since > self._seconds or self._query == self._number):
                self._call_roll(since)

    def _call_roll(self, since: float) -> None:
        rank, place, self._answers = self.comm.rank, self._place(), {}
        others = self._others()
        failed = f"did not complete {self._operation} in {self._seconds:g} s"
        if not self._exchange(query=others):
            self.abort(f"{failed}: it is inside a call of MPI", rank)
        called = self._time()
        waits, patience = ("has ended", self._seconds) if self._ended else ("is in ", _ROLL_SECONDS)
        deferred = False
        while self._time() - called < patience + _MORE_SECONDS * (deferred or self._still > 0):
            if self._wait(_TICK_SECONDS / 10) or self._since != since:
                return
            self._exchange()
            lower = [self._answers.get(other, "") for other in range(rank)]
            deferred = self._ending or any(answer.startswith(waits) for answer in lower)
            if len(self._answers) == len(others) and not deferred:
                break
        for other in others:
            if other not in self._answers:
                self.abort(f"{failed}: {_SILENT}", other)
        if self._ended:
            self._since = self._time()
            return
        for other, answer in sorted(self._answers.items()):
            if answer != place:
                self.abort(f"{failed}: it {answer}", other)
        self.abort(f"{failed}, and all other ranks are there too: is the network too slow?", rank)

    def _others(self) -> list[int]:
        return [other for other in range(self.comm.size) if other != self.comm.rank]

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Give whether MPI may be called now."""
        free = self._mpi_lock.acquire(timeout=_TICK_SECONDS)
        try:
            yield free or self._mpi.Query_thread() >= self._mpi.THREAD_MULTIPLE
        finally:
            if free:
                self._mpi_lock.release()

    def _send(self, ranks: Sequence[int], tag: int) -> None:
        number = -1 if self._ended else self._number
        self._sent += [self.comm.isend(number, rank, tag) for rank in ranks]

    def _exchange(self, query: Sequence[int] = ()) -> bool:
        """Query ranks, and receive and answer what has come; False if MPI may not be called now.

        Only this object's thread receives: another one could take what this one has seen.
        """
        with self._turn() as allowed:
            if not allowed:
                return False
            self._send(query, _QUERY)
            found = self._mpi.Status()
            while self.comm.iprobe(status=found):
                message = self.comm.recv(source=found.source, tag=found.tag)
                if found.tag == _ANSWER:
                    self._answers[found.source] = message
                elif found.tag == _ENDING:
                    self._ending = True
                else:
                    self._query = message
                    self._sent.append(self.comm.isend(self._place(), found.source, _ANSWER))
        return True

    def _place(self) -> str:
        frame = sys._current_frames().get(threading.main_thread().ident)
        if self._ended or frame is None:
            return "has ended"
        if self._since:
            return f"is in {self._operation}"
        code = frame.f_code
        return f"is at {os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
