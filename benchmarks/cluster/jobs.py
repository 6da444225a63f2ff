"""The jobs that bench_cluster.py starts: each candidate's processes by its own launcher."""

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
from dataclasses import dataclass
from typing import Callable, Mapping, Sequence

from benchmarks.cluster.gate import LOOPBACK, Gate, Lost

RANK = str(pathlib.Path(__file__).with_name("rank.py"))
# What decides how fast MXNet, MPI and OpenMP run: no candidate inherits it.
SETTINGS = ("MXNET_", "OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES", "HOROVOD_")
SETTINGS += ("OMPI_", "PMIX_", "PRTE_", "DMLC_", "PS_", "GLUONPAR_")
LAST_LINES = 5


class Unable(RuntimeError):
    """A candidate cannot be measured here, and why; no failure."""


@dataclass(frozen=True)
class Asked:
    """How many processes train on how many samples a step together, and who has Horovod."""

    processes: int
    batch_size: int
    horovod_python: str | None = None
    cores: int = 1

    @property
    def team(self) -> dict[str, str]:
        """Each process's share of the processors."""
        return {"OMP_NUM_THREADS": str(max(1, self.cores // self.processes))}


class Job:
    """A candidate's processes, who are stopped whenever they are not asked; ends them on close."""

    def __init__(self, name: str, asked: Asked) -> None:
        self.name, self._started = name, []
        self._stderr = tempfile.TemporaryFile()
        # Killed, mpirun leaves files that keep a later one with its process id from starting.
        self._folder = tempfile.mkdtemp(prefix="gluonpar-")
        ranks = 1 if name == "floor" else asked.processes
        self.gate = Gate(ranks)
        try:
            CANDIDATES[name].start(self, asked)
            self.loss = sum(
                hello["loss"] for hello in self.ask_all(lambda: self.gate.open(self.ended))
            )
        except BaseException:
            self.close()
            raise

    def ask(self, message: Mapping) -> list[dict]:
        """All ranks' answers; :class:`Lost`, with what they said last, if one gave none."""
        return self.ask_all(lambda: self.gate.ask(message))

    def ask_all(self, ask: Callable[[], list[dict]]) -> list[dict]:
        """What ``ask`` returns; :class:`Lost` with the job's last words."""
        try:
            return ask()
        except Lost as error:
            self._stderr.seek(0)
            lines = self._stderr.read().decode(errors="replace").splitlines()[-LAST_LINES:]
            raise Lost("\n  ".join([str(error), *lines])) from error

    def ended(self) -> str | None:
        """Why no rank will come any more: one of the processes that were started has ended."""
        for process in self._started:
            code = process.poll()
            if code is not None:
                return f"{process.args[0]} has ended with exit code {code}"
        return None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start one of the job's processes: its launcher, or a rank."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
        self._started.append(
            subprocess.Popen(
                command,
                env={**kept, **environment, "TMPDIR": self._folder},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,
            )
        )

    def close(self) -> None:
        """End all processes; return when the launcher is gone."""
        self.gate.close()
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._stderr.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def request(job: Job, asked: Asked) -> list[str]:
    """What a rank is started with: its program, and its argument."""
    words = {
        "candidate": job.name,
        "module": CANDIDATES[job.name].module,
        "processes": asked.processes,
        "batch_size": asked.batch_size,
        "port": job.gate.port,
    }
    return [RANK, json.dumps(words)]


def _alone(job: Job, asked: Asked) -> None:
    job.start([sys.executable, *request(job, asked)], {})


def _mpirun(job: Job, asked: Asked, **settings: str) -> None:
    """Open MPI's; one process runs by itself. A rank that is not asked is no rank that hangs."""
    environment = {**asked.team, **settings, "GLUONPAR_TIMEOUT": "1000000"}
    command = [sys.executable, *request(job, asked)]
    if asked.processes == 1:
        return job.start(command, environment)
    beside = pathlib.Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise Unable("there is no mpirun: pip install 'gluonpar[mpi]'")
    if os.getuid() == 0:
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    crowded = ["--oversubscribe"] * (asked.processes > asked.cores)  # which also binds to no core
    ranks = ["--use-hwthread-cpus", *crowded, "-n", str(asked.processes)]
    job.start([mpirun, *ranks, *command], environment)


def _mpirun_over_tcp(job: Job, asked: Asked) -> None:
    if asked.processes == 1:
        raise Unable("one process sends nothing")
    _mpirun(job, asked, OMPI_MCA_btl="tcp,self", OMPI_MCA_pml="ob1")


def _horovodrun(job: Job, asked: Asked) -> None:
    """Horovod's own launcher, with gloo, in the Python that was named.

    Gloo gives up when it has heard nothing for 30 s, which is what it is to be stopped.
    """
    if asked.processes == 1:
        raise Unable("one process sends nothing")
    if not asked.horovod_python:
        raise Unable("--horovod-python names no interpreter that has it")
    launcher = str(pathlib.Path(asked.horovod_python).parent / "horovodrun")
    where = ["-np", str(asked.processes), "-H", f"localhost:{asked.processes}"]
    command = [asked.horovod_python, launcher, "--gloo", *where]
    environment = {**asked.team, "HOROVOD_GLOO_TIMEOUT_SECONDS": "1000000"}
    job.start([*command, asked.horovod_python, *request(job, asked)], environment)


def _servers(job: Job, asked: Asked) -> None:
    """A scheduler, and a server beside each worker."""
    if asked.processes == 1:
        raise Unable("one process sends nothing")
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    shared = {
        "DMLC_PS_ROOT_URI": LOOPBACK,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_SERVER": str(asked.processes),
        "DMLC_NUM_WORKER": str(asked.processes),
        **asked.team,
    }
    for role in ["scheduler", *["server"] * asked.processes, *["worker"] * asked.processes]:
        job.start([sys.executable, *request(job, asked)], {**shared, "DMLC_ROLE": role})


@dataclass(frozen=True)
class Candidate:
    """How a job is started, the module that its ranks join through, and what is measured of it."""

    start: Callable[[Job, Asked], None]
    module: str
    about: str
    sums: bool = True
    trains: bool = True
    exchanges: bool = True


CANDIDATES = {
    "gluonpar": Candidate(_mpirun, "ranks_of_ours", "cluster.allreduce; train_batch"),
    "gluonpar trainer": Candidate(
        _mpirun, "ranks_of_ours", "gluonpar.Trainer on a Gluon network", sums=False
    ),
    "gluonpar over tcp": Candidate(
        _mpirun_over_tcp, "ranks_of_ours", "as gluonpar, but MPI without shared memory"
    ),
    "horovod": Candidate(
        _horovodrun, "ranks_of_others", "allreduce_; DistributedTrainer; gloo, over TCP"
    ),
    "dist_sync": Candidate(
        _servers, "ranks_of_others", "MXNet's kvstore: push and pull, over TCP", trains=False
    ),
    "trainer dist_sync": Candidate(
        _servers, "ranks_of_others", "gluon.Trainer with that kvstore", sums=False
    ),
    "floor": Candidate(
        _alone,
        "ranks_of_ours",
        "one process with as many devices that exchange nothing, as in bench_training.py",
        sums=False,
        exchanges=False,
    ),
}
