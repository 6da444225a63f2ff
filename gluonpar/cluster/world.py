"""This process's place among those of an MPI job. The only module that imports mpi4py."""

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

from gluonpar.cluster import launcher
from gluonpar.cluster.ending import last_line
from gluonpar.cluster.watch import FAILED, OtherRank, RankZero, Watch
from gluonpar.runtime import engine, memory_limits, threads

TIMEOUT, DEFAULT_TIMEOUT_SECONDS = "GLUONPAR_TIMEOUT", 20.0
MPI_ADDRESSES = (
    350 * memory_limits.MB
)  # with 100 MPI crashed, with 200 it had not started in 60 s; 300 did
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS, _POLLS_AT_ONCE = 50e-6, 20


class World(NamedTuple):
    """All processes of the job: MPI's module, a communicator of our own, and the watch.

    ``one_machine``: they share its memory.
    """

    rank: int
    size: int
    mpi: Any
    comm: Any
    watch: Watch
    one_machine: bool

    def meet(self) -> None:
        """Wait until all ranks are here, and sleep meanwhile: the core has other work.

        MPI's own waiting keeps a core busy, the very one that is to compute what the others need.
        """
        everybody, polls = self.comm.Ibarrier(), 0
        while not everybody.Test():
            polls += 1
            if polls > _POLLS_AT_ONCE:
                time.sleep(_POLL_SECONDS)


_world: World | None = None
_starting = threading.Lock()


def world() -> World | None:
    """The job this process belongs to; None if it runs by itself. Starts MPI when first called.

    Raises ImportError if mpi4py is missing, RuntimeError if MPI cannot be used, room.OutOfMemory if
    there is no room for it, ValueError if GLUONPAR_TIMEOUT is no time.
    """
    global _world
    if _world is None and launcher.launched():
        with _starting:
            _world = _world or _start()
    return _world


def rank() -> int:
    """This process's number among all of the MPI job, 0 to ``size() - 1``; 0 without MPI.

    >>> rank(), size()
    (0, 1)
    """
    found = world()
    return found.rank if found else 0


def size() -> int:
    """Number of processes that train as one; 1 without MPI."""
    found = world()
    return found.size if found else 1


def is_main() -> bool:
    """Whether this is rank 0, which prints, plots and saves for all."""
    return rank() == 0


def timeout_seconds() -> float:
    """How long a rank may be silent or be waited for: GLUONPAR_TIMEOUT, or 20 s."""
    text = os.environ.get(TIMEOUT, str(DEFAULT_TIMEOUT_SECONDS))
    with contextlib.suppress(ValueError):
        if float(text) >= 2:
            return float(text)
    raise ValueError(f"{TIMEOUT}={text!r} is no time; give seconds, 2 or more")


def _start() -> World:
    seconds = timeout_seconds()
    _die_with_the_launcher()
    memory_limits.require("MPI", 0, MPI_ADDRESSES)
    with _in_time(3 * seconds):
        mpi = _initialized_mpi()
        comm = mpi.COMM_WORLD.Dup()  # so that nobody else's messages come into ours
    if comm.size == 1:
        raise RuntimeError(
            "the launcher has started several processes, but MPI sees one: mpi4py was built for "
            f"another MPI than this launcher's; it has {mpi.Get_library_version().splitlines()[0]}"
        )
    launcher.mark_joined()
    watch = _watch(comm, seconds)
    _install(watch, mpi)
    hosts = _share_processors(comm)
    return World(comm.rank, comm.size, mpi, comm, watch, len(hosts) == 1)


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
            f"MPI gives thread level {MPI.Query_thread()}, and collectives are called from MXNet's "
            f"threads, one at a time: that needs level {MPI.THREAD_SERIALIZED} (SERIALIZED); use "
            "an MPI built with threads"
        )
    return MPI


def _watch(comm, seconds: float) -> Watch:
    """The watch, its connections made: from here on no rank is lost unnoticed."""
    watch = RankZero(comm.size, seconds) if comm.rank == 0 else None
    if watch:
        watch.start()
    invitation = comm.bcast(watch.invitation if watch else None)
    if watch is None:
        watch = OtherRank(comm.rank, seconds, invitation)
        watch.start()
    comm.Barrier()
    return watch


def _install(watch: Watch, mpi) -> None:
    """An error that ends this process ends the job, and so does its ordinary end before others'."""
    show = sys.excepthook

    def hook(kind, error, trace) -> None:
        show(kind, error, trace)
        watch.fail(
            "was interrupted (Ctrl-C)"
            if issubclass(kind, KeyboardInterrupt)
            else f"failed: {last_line(error)}"
        )

    def leave() -> None:
        watch.goodbye()
        if not mpi.Is_finalized():
            mpi.Finalize()

    sys.excepthook = hook
    engine.at_exit(leave)


def _share_processors(comm) -> set[str]:
    """Ranks that may run on the same processors share them, as contexts do; all ranks' hosts."""
    mine = (socket.gethostname(), sorted(os.sched_getaffinity(0)))
    everybody = comm.allgather(mine)
    neighbours = [processors for host, processors in everybody if host == mine[0]]
    share = sum(1 / sum(p in theirs for theirs in neighbours) for p in mine[1])
    threads.limit(max(1, int(share + 1e-9)))
    return {host for host, _ in everybody}


def _die_with_the_launcher() -> None:
    """Have Linux kill this process when its parent dies, so that none is left over."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _in_time(seconds: float) -> Iterator[None]:
    """End the process, with a word, if what is inside takes longer."""

    def give_up() -> None:
        print(
            f"gluonpar: not all ranks have come to MPI's start in {seconds:.0f} s; the job ends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(FAILED)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()
