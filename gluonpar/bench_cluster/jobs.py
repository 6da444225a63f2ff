"""The jobs that bench_cluster.py starts: each candidate's processes by its own launcher."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from typing import Any, Sequence

RANK = str(pathlib.Path(__file__).with_name("rank.py"))


class Unable(RuntimeError):
    """A candidate cannot be measured here, and why."""


def gluonpar(num_processes: int, sizes: Sequence[int], rounds: int, more: dict) -> dict[str, Any]:
    """Ours, under mpirun; one process runs by itself."""
    command = [sys.executable, *_arguments("gluonpar", sizes, rounds)]
    if num_processes == 1:
        return _answer(command, {"OMP_NUM_THREADS": "1"})
    beside = pathlib.Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise Unable("there is no mpirun: pip install 'gluonpar[mpi]'")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {"OMP_NUM_THREADS": "1", **(root if os.getuid() == 0 else {})}
    words = [mpirun, "--oversubscribe", "-n", str(num_processes), *command]
    return _answer(words, environment)


def horovod(num_processes: int, sizes: Sequence[int], rounds: int, more: dict) -> dict[str, Any]:
    """Horovod with gloo, in the Python that ``more`` names."""
    python = more.get("horovod_python")
    if not python:
        raise Unable("--horovod-python names an interpreter that has it")
    launcher = str(pathlib.Path(python).parent / "horovodrun")
    words = [python, launcher, "--gloo", "-np", str(num_processes), "-H"]
    words += [f"localhost:{num_processes}", python, *_arguments("horovod", sizes, rounds)]
    return _answer(words, {"OMP_NUM_THREADS": "1"})


def dist_sync(num_processes: int, sizes: Sequence[int], rounds: int, more: dict) -> dict[str, Any]:
    """MXNet's parameter server: a scheduler, and a server beside each worker."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_SERVER": str(num_processes),
        "DMLC_NUM_WORKER": str(num_processes),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *_arguments("dist_sync", sizes, rounds)]
    roles = ["scheduler", *["server"] * num_processes, *["worker"] * num_processes]
    started = [_start(command, {**shared, "DMLC_ROLE": role}) for role in roles]
    try:
        outs = [job.communicate(timeout=600)[0] for job in started[-num_processes:]]
    finally:
        for job in started:
            job.kill()
            job.wait()
    return _found("".join(outs), "dist_sync")


CANDIDATES = {"gluonpar": gluonpar, "horovod": horovod, "dist_sync": dist_sync}


def _arguments(kind: str, sizes: Sequence[int], rounds: int) -> list[str]:
    return [RANK, kind, json.dumps(list(sizes)), str(rounds)]


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env={**os.environ, **environment}, **pipes)


def _answer(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    out, _ = _start(command, environment).communicate(timeout=600)
    return _found(out, command[0])


def _found(out: str, what: str) -> dict[str, Any]:
    for line in out.splitlines():
        start = line.find('{"kind"')
        if start >= 0:  # horovodrun puts words before it
            return json.loads(line[start:])
    raise Unable(f"{what} gave no answer: {' / '.join(out.splitlines()[-3:])}")
