"""What the doctor examines: each check yields findings about one part of the installation.

A finding is a state, a text and, optionally, a remedy. The state is 'ok'; 'note': worth knowing; or
'wrong': something cannot work. This process uses the standard library only; what may be broken,
such as NumPy and MXNet, is tried out in a child process (:func:`probes.run`), and ProbeFailed
becomes a finding.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Callable, Iterator, Tuple, Union

from gluonpar.diagnostics.doctor import probes
from gluonpar.runtime import driver, startup, wheels

OK, NOTE, WRONG = "ok", "note", "wrong"
Found = Union[Tuple[str, str], Tuple[str, str, str]]

CPU, CUDA = "pip install 'gluonpar[cpu]'", "pip install 'gluonpar[cu112]'"

SHM_BYTES = 256 << 20  # MPI or a DataLoader's workers soon fill less than this
_PREFIXES = ("MXNET_", "OMP_", "GOMP_", "KMP_", "MALLOC_", "GLUONPAR_")
_NAMES = ("GLIBC_TUNABLES", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD")
_OWN_THREADS = (
    "every device uses that many threads, where gluonpar would share the processors out; unset it, "
    "unless that is intended"
)
_REMEDIES = {
    "MXNET_ENGINE_TYPE": "NaiveEngine runs one operator at a time, so devices wait for each other; "
    "unset it, unless you are looking for an error",
    "OMP_NUM_THREADS": _OWN_THREADS,
    "MXNET_OMP_MAX_THREADS": _OWN_THREADS,
}


def python() -> Iterator[Found]:
    """The interpreter and the platform, compared with those that MXNet 1.9.1's wheels support."""
    text = f"{platform.python_version()} at {sys.executable}"
    if (3, 8) <= sys.version_info[:2] <= (3, 12):
        yield OK, text
    else:
        yield WRONG, text, "use Python 3.8 to 3.12, which MXNet 1.9.1 runs on"
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        text = f"{platform.machine()} {sys.platform}: MXNet 1.9.1 has wheels for x86-64 Linux only"
        yield WRONG, text, "use such a machine, or a container of that platform"
    for path in _shadowing_files():
        text = f"{path} shadows the module {path.stem} in programs that run in this folder"
        yield NOTE, text, "rename it"


def _shadowing_files() -> list[Path]:
    """Return the files of the current folder that Python would import in place of a module."""
    library = {path.stem for path in Path(os.__file__).parent.iterdir()} - {"test"}
    try:
        files = sorted(Path.cwd().glob("*.py"))
    except OSError:  # the folder was removed
        return []
    return [path for path in files if path.stem in {*library, "numpy", "mxnet", "tqdm", "mpi4py"}]


def numpy() -> Iterator[Found]:
    """Whether NumPy is installed, works, and is older than 2."""
    remedy = "pip install 'numpy<2'"
    facts = probes.run("numpy", remedy)
    text = f"{facts['version']} at {facts['file']}"
    if int(facts["version"].split(".")[0]) >= 2:
        yield WRONG, f"{text}; MXNet 1.9.1 needs NumPy before 2", remedy
    else:
        yield OK, text


def mxnet() -> Iterator[Found]:
    """Whether MXNet is installed once, can be imported, computes, and is version 1.9.1."""
    facts = probes.run("mxnet", f"if the message names no remedy, reinstall it: {CPU} or {CUDA}")
    wheel = ", ".join(wheels.installed()) or "not a wheel"
    text = f"{facts['version']} ({wheel}) at {facts['file']}"
    if facts["version"] != "1.9.1":
        yield WRONG, f"{text}; gluonpar needs 1.9.1", f"{CPU} or {CUDA}"
    else:
        built = "with" if facts["cuda"] else "without"
        yield OK, f"{text}, {built} CUDA; finds {facts['num_gpus']} GPUs"
    if "cuda_error" in facts:
        text = f"MXNet cannot use any GPU, since CUDA fails: {facts['cuda_error']}"
        yield WRONG, text, "see `driver` below; CPU devices work (--device cpu)"


def nvidia_driver() -> Iterator[Found]:
    """NVIDIA's driver, and the version of CUDA that it supports."""
    needed = wheels.with_cuda(wheels.installed())
    try:
        facts = probes.run("driver", "the message says what to do; nvidia-smi may say more")
    except probes.ProbeFailed as error:
        yield WRONG if needed else NOTE, str(error), error.remedy
        return
    if "missing" in facts:
        text = f"no NVIDIA driver: {facts['missing']}; the devices are CPU contexts"
        remedy = f"without a GPU: pip uninstall -y mxnet-cu112, then {CPU}; with one: its driver"
        yield (WRONG, text, remedy) if needed else (OK, text)
    elif needed and facts["too_old"]:
        text = f"{facts['file']} supports CUDA up to {facts['cuda']}; mxnet-cu112 needs CUDA 11"
        yield WRONG, text, "install a newer driver; until then use CPU devices (--device cpu)"
    else:
        yield OK, f"{facts['file']} supports CUDA up to {facts['cuda']}"


def gpus() -> Iterator[Found]:
    """Each GPU's compute capability against the kernels in MXNet's wheel."""
    needed = wheels.with_cuda(wheels.installed())
    try:
        gpus = probes.run("driver", "").get("gpus")
    except probes.ProbeFailed:  # nvidia_driver reports it
        return
    if gpus == []:
        remedy = "see what nvidia-smi -L lists; unset CUDA_VISIBLE_DEVICES if it hides them"
        yield NOTE, f"the driver shows no GPU{driver.hidden()}", remedy
    any_usable = any(gpu["usable"] for gpu in gpus or [])
    for gpu in gpus or []:
        if gpu["usable"] and needed:
            yield OK, f"{gpu['name']}: usable"
        elif gpu["usable"]:
            text = f"{gpu['name']}: usable, but the installed MXNet is without CUDA"
            yield NOTE, text, f"to use it: pip uninstall -y mxnet, then {CUDA}"
        else:
            text = (
                f"{gpu['name']}: too {'new' if gpu['newer'] else 'old'}, MXNet cannot run on it. "
                f"{driver.KERNELS} only, and nothing that a driver could translate for others; an "
                "operator would fail with 'no kernel image is available for execution'"
            )
            remedy = f"train on CPU devices (--device cpu, {CPU}) or on a GPU of those capabilities"
            yield WRONG if needed and not any_usable else NOTE, text, remedy


def cuda_libraries() -> Iterator[Found]:
    """Which CUDA libraries load, from where, and which ones a wheel with CUDA lacks."""
    needed = wheels.with_cuda(wheels.installed())
    facts = probes.run("cuda", f"reinstall them: {CUDA}")
    for name, path in facts["loaded"].items():
        yield OK, f"{name} loads from {path}"
    for name, (error, remedy) in facts["failed"].items() if needed else ():
        yield WRONG, f"{name} does not load: {error}", remedy or CUDA
    if needed and facts["untried"]:
        text = f"not tried, since they may need a damaged one: {', '.join(facts['untried'])}"
        yield NOTE, text, "run doctor again after the repair"
    if not (needed or facts["loaded"]):
        yield OK, "no CUDA libraries, and the installed MXNet needs none"


def settings() -> Iterator[Found]:
    """The environment, and whether it overrides what gluonpar would set."""
    wanted = startup.settings(wheels.installed())
    for name, value in wanted.items():
        by_user = os.environ.get(name, value)
        if by_user == value:
            yield OK, f"{name}={value}, by gluonpar"
        else:
            text = f"{name}={by_user} in the environment overrides gluonpar's {value}"
            yield NOTE, text, f"unset {name}, unless you measured it"
    if not any(n.startswith("MALLOC_") or n == "GLIBC_TUNABLES" for n in os.environ):
        yield OK, "malloc keeps large arrays in the heap, by gluonpar"
    for name in sorted(os.environ):
        if name not in wanted and (name in _NAMES or name.startswith(_PREFIXES)):
            text = f"{name}={os.environ[name]} is set in the environment"
            yield NOTE, text, _REMEDIES.get(name, "")


def threads() -> Iterator[Found]:
    """The processors that this process may use, its CPU quota, and other programs' load."""
    allowed, present, quota = len(os.sched_getaffinity(0)), os.cpu_count() or 1, cpu_quota()
    limited = "" if quota is None else f", of which a cgroup lets it use {quota:g}"
    yield OK, f"{allowed} of {present} processors{limited}"
    load = probes.load_average()
    if load > allowed:
        text = f"other programs compete for them: the load average is {load:.1f}"
        yield NOTE, text, "measure times when no other program is running"
    if quota is not None and quota < allowed:
        text = f"{allowed} threads will compute in the time of {quota:g} processors"
        remedy = f"start with taskset -c 0-{max(0, int(quota) - 1)}, or give the container more"
        yield NOTE, text, remedy
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdecimal() and int(wanted) > allowed:
        text = f"OMP_NUM_THREADS={wanted} threads per device, but only {allowed} processors"
        yield NOTE, text, "unset OMP_NUM_THREADS"


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many processors' time the control groups (v2 or v1) grant; None: no limit."""
    quotas = []
    lines = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    own = {Path(line[2].lstrip("/")) for line in lines if len(line) == 3}
    for group in {Path()}.union(own, *(path.parents for path in own)):
        limit = _read(root / "sys/fs/cgroup" / group / "cpu.max").split()
        v1 = root / "sys/fs/cgroup/cpu" / group
        limit = limit or [_read(v1 / f"cpu.cfs_{what}_us") for what in ("quota", "period")]
        if len(limit) == 2 and all(number.isdecimal() for number in limit) and int(limit[1]):
            quotas.append(int(limit[0]) / int(limit[1]))
    return min(quotas, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # no such file, or not readable: no limit is known
        return ""


def shared_memory(folder: str = "/dev/shm") -> Iterator[Found]:
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


def data() -> Iterator[Found]:
    """Where Fashion-MNIST is; nothing is downloaded."""
    remedy = "repair or remove the files, or give another folder with --data-dir"
    facts = probes.run("data", remedy)
    if "found" in facts:
        yield OK, f"Fashion-MNIST in {facts['found']}"
    else:
        text = f"Fashion-MNIST is not in {', '.join(facts['searched'])}"
        remedy = "training downloads it; or apt-get install dataset-fashion-mnist; or --data-dir"
        yield NOTE, text, remedy


def mpi() -> Iterator[Found]:
    """mpi4py and mpirun, which only training in several processes needs, and whether they match."""
    remedy = "for several processes: pip install 'gluonpar[mpi]'"
    if importlib.util.find_spec("mpi4py") is None:
        yield NOTE, "no mpi4py, so one process only", remedy
        return
    facts = probes.run("mpi", remedy)
    yield OK, f"mpi4py {facts['mpi4py']} with {facts['library']}"
    if "mpirun" not in facts:
        yield NOTE, "no mpirun, so one process only", remedy
        return
    text = f"mpirun is {facts['mpirun']}, {facts['mpirun_version']!r}"
    if (facts["vendor"] == "Open MPI") == ("Open MPI" in facts["mpirun_version"]):
        yield OK, text
    else:
        text = f"{text}: not the MPI of mpi4py, so each process would be rank 0 of 1"
        yield WRONG, text, "use the mpirun of the same MPI, by its full path"


CHECKS: dict[str, Callable[[], Iterator[Found]]] = {
    "python": python,
    "numpy": numpy,
    "mxnet": mxnet,
    "driver": nvidia_driver,
    "gpu": gpus,
    "cuda": cuda_libraries,
    "settings": settings,
    "threads": threads,
    "shared memory": shared_memory,
    "data": data,
    "mpi": mpi,
}
