"""Jobs of several processes under a real mpirun, on this machine."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

HERE = pathlib.Path(__file__).parent
MPIRUN = pathlib.Path(sys.executable).parent / "mpirun"
RANK = [sys.executable, str(HERE / "cluster_rank.py")]
TRAIN = [sys.executable, str(HERE.parents[1] / "scripts" / "train_lenet.py")]
QUICK = ["--device", "cpu", "--dataset", "synthetic", "--limit", "8", "--batch-size", "4"]
# mpirun leaves files named after its process id when it is killed, and the next one that happens to
# get that id cannot start; so each has a folder of its own for them.
SESSIONS = tempfile.TemporaryDirectory(prefix="gluonpar-mpi-")

needs_mpi = pytest.mark.skipif(
    not MPIRUN.exists() or importlib.util.find_spec("mpi4py") is None,
    reason="MPI is not installed: pip install 'gluonpar[mpi]'",
)


def mpirun(*commands, **environment):
    """Start a job: each command is how many ranks, and what they run."""
    words = []
    for ranks, command in commands:
        words += [":"] * bool(words) + ["-n", str(ranks), *command]
    environment["TMPDIR"] = tempfile.mkdtemp(dir=SESSIONS.name)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.Popen(
        [str(MPIRUN), "--oversubscribe", *words],
        env={**os.environ, **(root if os.getuid() == 0 else {}), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def succeed(job):
    out, err = job.communicate(timeout=600)
    assert job.returncode == 0, out + err
    return out, err


def line_of(job):
    """What it prints next, which must come."""
    line = job.stdout.readline()
    assert line, job.stderr.read()
    return line
