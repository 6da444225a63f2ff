"""Facts that the doctor collects in child processes, since collecting them may end the process.

:func:`run` starts a Python process that calls one function of this module and writes its result as
JSON. The child imports modules without ``gluonpar/__init__.py``, so without MXNet.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 120.0  # importing MXNet takes 1 to 3 s, and much longer on a busy machine

# Packages whose __init__ imports MXNet, or may.
_SKIPPED = ("gluonpar", "gluonpar.checkpoint", "gluonpar.training")
_STANDALONE = Path(__file__).parents[2] / "runtime" / "standalone.py"
_CHILD = f"""
import runpy, sys
runpy.run_path(sys.argv[1])["skip_init"](*{_SKIPPED!r})
from gluonpar.diagnostics.doctor import probes
probes.write_result(sys.argv[2])
"""
_MARK = "gluonpar-probe:"


class ProbeFailed(Exception):
    """A probe raised an exception, or its process ended; ``remedy`` says what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def run(probe: str, remedy: str, timeout_seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    """Return the facts that the function ``probe`` of this module finds, in a child process.

    Raises ProbeFailed, with ``remedy``, if it cannot, whatever the reason.
    """
    command = [sys.executable, "-c", _CHILD, str(_STANDALONE), probe]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired as error:
        what = f"no result within {timeout_seconds:g} s (the load average is {load_average():.0f})"
        raise ProbeFailed(what, remedy) from error
    except OSError as error:
        raise ProbeFailed(f"no process could be started: {error}", remedy) from error
    lines = done.stdout.decode(errors="replace").splitlines()
    results = [line[len(_MARK) :] for line in lines if line.startswith(_MARK)]
    if done.returncode == 0 and results:
        facts, failure = json.loads(results[-1])
        if failure:
            raise ProbeFailed(failure, remedy)
        return facts
    errors = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
    how = f"with exit code {done.returncode}"
    if done.returncode < 0:
        names = {s.value: s.name for s in signal.Signals}
        how = f"by {names.get(-done.returncode, f'signal {-done.returncode}')}"
    raise ProbeFailed(f"it ended the process {how}; last line: {errors[-1]}", remedy)


def load_average() -> float:
    """Return the number of runnable processes in the last minute; NaN if it cannot be read."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return float("nan")


def write_result(probe: str) -> None:
    """Call the probe and write its facts, or the exception it raised; in the child process."""
    facts, failure = {}, ""
    try:
        facts = PROBES[probe]()
    except Exception as error:  # whatever it is, the doctor reports it
        failure = f"{type(error).__name__}: {summary(error)}"
    sys.stdout.write(f"\n{_MARK}{json.dumps([facts, failure])}\n")
    sys.stdout.flush()


def summary(error: Exception) -> str:
    """Return the most informative line of an exception; MXNet's begin with a C++ traceback."""
    lines = str(error).strip().splitlines() or [""]
    return (lines[-1] if lines[0].startswith("Traceback") else lines[0]).strip()


def numpy() -> dict[str, Any]:
    """Import NumPy and compute something; its version and file."""
    import numpy as np

    np.ones(3).sum()
    return {"version": np.__version__, "file": np.__file__}


def mxnet() -> dict[str, Any]:
    """Import the whole of gluonpar, and MXNet with it, and compute something."""
    for name in _SKIPPED:
        del sys.modules[name]
    importlib.import_module("gluonpar")  # first: it prepares the process, and names what is missing
    import mxnet as mx

    mx.nd.ones((3,)).sum().asscalar()
    cuda = mx.runtime.Features().is_enabled("CUDA")
    facts = {"version": mx.__version__, "file": mx.__file__, "cuda": cuda}
    try:
        return {**facts, "num_gpus": mx.context.num_gpus()}
    except mx.base.MXNetError as error:
        return {**facts, "num_gpus": 0, "cuda_error": summary(error)}


def driver() -> dict[str, Any]:
    """NVIDIA's driver and its GPUs, or the loader's message if there is no driver."""
    from gluonpar.runtime import driver

    try:
        library = driver.load()
    except driver.DriverMissing as error:
        return {"missing": str(error.__cause__)}
    gpus = []
    for gpu in driver.gpus(library):
        newer = gpu.capability > driver.NEWEST_CAPABILITY
        gpus.append({"name": str(gpu), "usable": driver.usable(gpu), "newer": newer})
    cuda = driver.cuda_version(library)
    supported = {"cuda": driver.version(cuda), "too_old": cuda < driver.OLDEST_CUDA}
    return {"file": _mapped_file(driver.LIBRARY), **supported, "gpus": gpus}


def cuda() -> dict[str, Any]:
    """For each CUDA library the file that gluonpar loads here, or why it cannot be loaded.

    ``failed`` maps a library to what is wrong and the remedy, "" for installing it. ``untried`` may
    need a library that is damaged, which would crash the system's loader.
    """
    import ctypes

    from gluonpar.runtime import cuda_libraries

    failed: dict[str, tuple[str, str]] = {}
    for path in cuda_libraries.in_wheels("lib*.so*"):
        wrong = cuda_libraries.damage(path)
        if wrong:
            failed[path.name] = (f"{path} is damaged: {wrong}", cuda_libraries.reinstall(path))
    names = list(cuda_libraries.LIBRARIES)
    safe = min((names.index(name) for name in failed if name in names), default=len(names))
    loaded: dict[str, str] = {}
    for name in names[:safe]:
        print(f"loading {name}", file=sys.stderr, flush=True)  # the last line if the process ends
        try:
            paths = cuda_libraries.load(name) or [name]
            ctypes.CDLL(str(paths[0]), mode=ctypes.RTLD_GLOBAL)  # if not PyPI's: as MXNet would
            loaded[name] = str(paths[0]) if os.path.isabs(paths[0]) else _mapped_file(name)
        except OSError as error:
            failed[name] = (str(error), getattr(error, "remedy", ""))
    untried = [name for name in names[safe:] if name not in failed]
    return {"loaded": loaded, "failed": failed, "untried": untried}


def _mapped_file(library: str) -> str:
    """Return the file from which a library of this name was loaded into this process."""
    stem = library.split(".so")[0] + ".so"
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = [line.split(maxsplit=5)[-1].strip() for line in file]
    except OSError as error:
        return f"an unknown file: {error}"
    return next((path for path in paths if os.path.basename(path).startswith(stem)), library)


def data() -> dict[str, Any]:
    """The first folder with all of Fashion-MNIST, or the folders searched; downloads nothing."""
    from gluonpar.training.data import fashion_mnist, locate

    searched = []
    for folder, what in locate.folders().items():
        if not fashion_mnist.missing(folder):
            _, edition = fashion_mnist.read_folder(folder)
            return {"found": f"{folder} ({what}, edition of {edition.date})"}
        searched.append(f"{folder} ({what})")
    return {"searched": searched}


def mpi() -> dict[str, Any]:
    """The MPI library of mpi4py, which is not initialized, and the version of mpirun."""
    import shutil

    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    beside_python = os.path.dirname(sys.executable)
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=beside_python)
    facts = {
        "mpi4py": mpi4py.__version__,
        "library": MPI.Get_library_version().split("\n")[0].strip("\0 "),
        "vendor": MPI.get_vendor()[0],
    }
    if mpirun is None:
        return facts
    done = subprocess.run([mpirun, "--version"], capture_output=True, timeout=TIMEOUT_SECONDS / 2)
    version = " ".join(done.stdout.decode(errors="replace").split())[:80]
    return {**facts, "mpirun": mpirun, "mpirun_version": version}


PROBES = {probe.__name__: probe for probe in (numpy, mxnet, driver, cuda, data, mpi)}
