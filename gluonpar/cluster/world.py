"""This process's rank among the processes of an MPI job. The only module that imports mpi4py."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, Iterator, NamedTuple

from gluonpar.cluster import failures, launcher
from gluonpar.runtime import engine, memory_limits, threads

# Address space: with 100 MB MPI crashed, with 200 MB it did not start in 60 s, with 300 MB it did.
MPI_ADDRESSES = 350 * memory_limits.MB
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_POLL_SECONDS, _POLLS_AT_ONCE = 50e-6, 20


class World(NamedTuple):
    """All processes of the job: mpi4py's module, a communicator, and the failure detector.

    A thread holds ``mpi_lock`` while it calls MPI. ``one_machine``: all ranks share its memory.
    """

    rank: int
    size: int
    mpi: Any
    comm: Any
    mpi_lock: threading.Lock
    detector: failures.FailureDetector
    one_machine: bool

    def meet(self, comm: Any = None) -> None:
        """Wait until all ranks have called this. Sleeps between polls.

        MPI's own waiting would keep a core busy that computes for the rank that is late.
        """
        with self.mpi_lock:
            barrier = (comm or self.comm).Ibarrier()
        polls = 0
        while not self._done(barrier):
            polls += 1
            if polls > _POLLS_AT_ONCE:
                time.sleep(_POLL_SECONDS)

    def _done(self, request: Any) -> bool:
        with self.mpi_lock:
            return request.Test()


_world: World | None = None
_starting = threading.Lock()


def world() -> World | None:
    """Return the job that this process belongs to, or None. The first call starts MPI.

    Raises ImportError without mpi4py, RuntimeError if MPI cannot be used, memory_limits.OutOfMemory
    if there is too little memory for it, ValueError if GLUONPAR_TIMEOUT is invalid.
    """
    global _world
    if _world is None and launcher.launched():
        with _starting:
            _world = _world or _start()
    return _world


def rank() -> int:
    """Return this process's number in the MPI job, 0 to ``size() - 1``; 0 without MPI.

    >>> rank(), size()
    (0, 1)
    """
    found = world()
    return found.rank if found else 0


def size() -> int:
    """Return the number of processes that train together; 1 without MPI."""
    found = world()
    return found.size if found else 1


def is_main() -> bool:
    """Return whether this is rank 0, the rank that prints, plots and saves."""
    return rank() == 0


def abort(why: str) -> None:
    """End all processes of the job with exit code 1. Does nothing if there is one process.

    Prints "gluonpar: rank 1 (pid 4711 on node2) WHY; the job ends" on stderr.
    """
    job = world()
    if job is not None:
        job.detector.abort(why)


def _start() -> World:
    seconds = failures.time_limit()
    _die_with_the_launcher()
    memory_limits.require("MPI", 0, MPI_ADDRESSES)
    with _time_limit_of_start(3 * seconds):
        mpi = _initialized_mpi()
        comm, comm_of_detector = mpi.COMM_WORLD.Dup(), mpi.COMM_WORLD.Dup()
        places = comm.allgather((socket.gethostname(), os.getpid(), os.sched_getaffinity(0)))
    if comm.size == 1:
        raise RuntimeError(
            "the launcher started several processes, but MPI sees one: mpi4py was built for "
            f"another MPI than this launcher's, {mpi.Get_library_version().splitlines()[0]}"
        )
    launcher.mark_joined()
    host = places[comm.rank][0]
    _share_processors([processors for other, _, processors in places if other == host])
    names = [f"rank {rank} (pid {pid} on {host})" for rank, (host, pid, _) in enumerate(places)]
    mpi_lock = threading.Lock()
    detector = failures.FailureDetector(mpi, comm_of_detector, mpi_lock, names, seconds)
    detector.end_job_on_exception()
    one_machine = len({host for host, _, _ in places}) == 1
    job = World(comm.rank, comm.size, mpi, comm, mpi_lock, detector, one_machine)
    engine.at_exit(lambda: _leave(job))
    return job


def _initialized_mpi():
    try:
        import mpi4py
    except ImportError as error:
        raise ImportError(
            "this process was started by an MPI launcher, and training on several processes needs "
            f"mpi4py ({error}): pip install 'gluonpar[mpi]'"
        ) from error
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise RuntimeError(
            f"MPI must support thread level {MPI.THREAD_SERIALIZED} (SERIALIZED), got "
            f"{MPI.Query_thread()}; use an MPI built with threads"
        )
    return MPI


def _leave(job: World) -> None:
    job.detector.wait_at_exit(job.meet)
    if not job.mpi.Is_finalized():
        job.mpi.Finalize()


def _share_processors(of_each_rank: list[set[int]]) -> None:
    """Divide each processor of this machine evenly among the ranks that may run on it."""
    own = os.sched_getaffinity(0)
    share = sum(1 / sum(processor in other for other in of_each_rank) for processor in own)
    threads.limit(max(1, int(share + 1e-9)))


def _die_with_the_launcher() -> None:
    """Have Linux kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _time_limit_of_start(seconds: float) -> Iterator[None]:
    def end() -> None:
        line = f"gluonpar: not all ranks started MPI within {seconds:g} s; the job ends"
        print(line, file=sys.stderr, flush=True)
        os._exit(failures.FAILED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
