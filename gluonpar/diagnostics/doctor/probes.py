"""What the doctor tries out in another process, which may end there in whatever way it likes.

:func:`ask` starts a Python that runs one function of this module by name and writes what it returns
as JSON. That process has the package gluonpar without its ``__init__``, so that a module can be
imported without MXNet.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT_SECONDS = 120.0  # importing MXNet takes 1 to 3 s, and many times that on a busy machine

_MARK = "gluonpar-probe:"
_CHILD = """
import os, sys, types
for name in ("gluonpar", "gluonpar.checkpoint", "gluonpar.training"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [os.path.join(sys.argv[1], *name.split(".")[1:])]
from gluonpar.diagnostics.doctor import probes
probes.answer(sys.argv[2])
"""


class Answer(NamedTuple):
    """What a probe found, or why it found nothing: one of the two is empty."""

    facts: dict[str, Any]
    failure: str


def ask(probe: str, timeout_seconds: float = TIMEOUT_SECONDS) -> Answer:
    """Run the function ``probe`` of this module in a process of its own. Never raises."""
    command = [sys.executable, "-c", _CHILD, str(Path(__file__).parents[2]), probe]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        busy = f"the load average is {load_average():.0f}"
        return Answer({}, f"did not answer within {timeout_seconds:g} s ({busy})")
    except OSError as error:
        return Answer({}, f"no process could be started: {error}")
    written = done.stdout.decode(errors="replace").splitlines()
    answers = [line[len(_MARK) :] for line in written if line.startswith(_MARK)]
    if done.returncode == 0 and answers:
        return Answer(*json.loads(answers[-1]))  # as answer() wrote it
    return Answer({}, _end(done.returncode, done.stderr.decode(errors="replace")))


def _end(code: int, stderr: str) -> str:
    last = (stderr.strip().splitlines() or ["it wrote nothing"])[-1]
    if code < 0:
        known = {s.value: s.name for s in signal.Signals}
        return f"it ended the process ({known.get(-code, f'signal {-code}')}); last line: {last}"
    return f"it ended the process with exit code {code}; last line: {last}"


def load_average() -> float:
    """Programs that computed, or waited for a processor, in the last minute; NaN if not known."""
    try:
        return os.getloadavg()[0]
    except OSError:  # it is read from /proc
        return float("nan")


def answer(probe: str) -> None:
    """In the other process: run the probe and write its facts, or the exception it raised."""
    try:
        found = [_PROBES[probe](), ""]
    except Exception as error:  # the doctor is to hear of it, whatever it is
        found = [{}, f"{type(error).__name__}: {_gist(error)}"]
    sys.stdout.write(f"\n{_MARK}{json.dumps(found)}\n")
    sys.stdout.flush()


def _gist(error: Exception) -> str:
    """The one line to show of an exception; MXNet's begin with a traceback of C++."""
    lines = str(error).strip().splitlines() or [""]
    return (lines[-1] if lines[0].startswith("Traceback") else lines[0]).strip()


def numpy() -> dict[str, Any]:
    """NumPy's version and place, and whether it can add."""
    import numpy as np

    return {"version": np.__version__, "file": np.__file__, "adds": int(np.ones(3).sum()) == 3}


def mxnet() -> dict[str, Any]:
    """Import the whole of gluonpar, and MXNet with it, and compute something."""
    for name in ("gluonpar", "gluonpar.checkpoint", "gluonpar.training"):
        del sys.modules[name]  # the ones without __init__
    importlib.import_module("gluonpar")  # first: it prepares the process, and says what is missing
    import mxnet as mx

    facts = {
        "version": mx.__version__,
        "file": mx.__file__,
        "cuda": mx.runtime.Features().is_enabled("CUDA"),
        "adds": float(mx.nd.ones((3,)).sum().asscalar()) == 3,
    }
    try:
        return {**facts, "num_gpus": mx.context.num_gpus()}
    except mx.base.MXNetError as error:
        return {**facts, "num_gpus": 0, "cuda_fails": _gist(error)}


def settings() -> dict[str, Any]:
    """The settings that gluonpar makes where the user has made none."""
    from gluonpar.runtime import startup, wheels

    return startup.settings(wheels.installed())


def driver() -> dict[str, Any]:
    """What NVIDIA's driver says of itself and its GPUs, or that there is none."""
    from gluonpar.runtime import driver

    try:
        library = driver.load()
    except driver.DriverMissing as error:
        return {"missing": str(error.__cause__)}
    gpus = [
        {
            "name": str(gpu),
            "usable": driver.usable(gpu),
            "newer": gpu.capability > driver.NEWEST_CAPABILITY,
        }
        for gpu in driver.gpus(library)
    ]
    cuda = driver.cuda_version(library)
    return {
        "file": _mapped(driver.LIBRARY),
        "cuda": driver.version(cuda),
        "too_old": cuda < driver.OLDEST_CUDA,
        "kernels": " to ".join(
            map(driver.version, (driver.OLDEST_CAPABILITY, driver.NEWEST_CAPABILITY))
        ),
        "gpus": gpus,
    }


def cuda() -> dict[str, Any]:
    """Of each CUDA library the file that loads here, or why none does, as gluonpar loads them.

    ``failed`` gives, by library, what is wrong and the remedy, if it is another than installing.
    ``untried`` may need one that is damaged, and the system's loader would not survive that.
    """
    import ctypes

    from gluonpar.runtime import cuda_libraries as cuda

    failed: dict[str, tuple[str, str]] = {}
    for path in cuda.in_wheels("lib*.so*"):
        wrong = cuda.damage(path)
        if wrong:
            failed[path.name] = (f"{path} is damaged: {wrong}", cuda.reinstall(path))
    listed = list(cuda.LIBRARIES)
    safe = min((listed.index(name) for name in failed if name in listed), default=len(listed))
    loaded: dict[str, str] = {}
    for name in listed[:safe]:
        print(f"loading {name}", file=sys.stderr, flush=True)  # known, should this process end here
        try:
            paths = cuda.load(name) or [name]
            ctypes.CDLL(str(paths[0]), mode=ctypes.RTLD_GLOBAL)  # what PyPI lacks, MXNet takes here
            loaded[name] = str(paths[0]) if os.path.isabs(paths[0]) else _mapped(name)
        except OSError as error:
            failed[name] = (str(error), getattr(error, "remedy", ""))
    untried = [name for name in listed[safe:] if name not in failed]
    return {"loaded": loaded, "failed": failed, "untried": untried}


def _mapped(library: str) -> str:
    """The file from which a library of this name was loaded into this process."""
    stem = library.split(".so")[0] + ".so"
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = [line.split(maxsplit=5)[-1].strip() for line in file]
    except OSError as error:
        return f"a file that cannot be told: {error}"
    return next((path for path in paths if os.path.basename(path).startswith(stem)), library)


def data() -> dict[str, Any]:
    """Where Fashion-MNIST is, without downloading: the first folder that has it all, or none."""
    from gluonpar.training.data import fashion_mnist, locate

    tried = []
    for folder, what in locate.folders().items():
        lacking = fashion_mnist.missing(folder)
        if not lacking:
            _, edition = fashion_mnist.read_folder(folder)
            return {"found": f"{folder} ({what}, edition of {edition.date})"}
        tried.append(f"{folder} ({what})")
    return {"tried": tried}


def mpi() -> dict[str, Any]:
    """The MPI library that mpi4py has, which is not started, and what mpirun says of itself."""
    import shutil

    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    beside = os.path.dirname(sys.executable)
    starter = shutil.which("mpirun") or shutil.which("mpirun", path=beside)
    facts = {
        "mpi4py": mpi4py.__version__,
        "library": MPI.Get_library_version().split("\n")[0].strip("\0 "),
        "vendor": MPI.get_vendor()[0],
    }
    if starter is None:
        return facts
    done = subprocess.run([starter, "--version"], capture_output=True, timeout=TIMEOUT_SECONDS / 2)
    said = done.stdout.decode(errors="replace").strip()
    return {**facts, "starter": starter, "starter_says": " ".join(said.split())[:80]}


_PROBES = {p.__name__: p for p in (numpy, mxnet, settings, driver, cuda, data, mpi)}
