"""What the doctor looks at: each function yields findings about one part of the installation.

Only the standard library is used in this process; whatever may be broken, NumPy and MXNet first of
all, is tried out in another one (:mod:`gluonpar.diagnostics.doctor.probes`).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Iterator

from gluonpar.diagnostics.doctor import probes
from gluonpar.diagnostics.doctor.findings import CPU, CUDA, NOTE, OK, WRONG, Finding
from gluonpar.runtime import wheels

SHM_BYTES = 256 << 20  # less than this and MPI or a DataLoader's workers soon find it full
_PREFIXES = ("MXNET_", "OMP_", "GOMP_", "KMP_", "MALLOC_", "GLUONPAR_")
_NAMES = ("GLIBC_TUNABLES", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD")


def python() -> Iterator[Finding]:
    """The interpreter and the platform, against those that MXNet 1.9.1's wheels are for."""
    text = f"{platform.python_version()} at {sys.executable}"
    if (3, 8) <= sys.version_info[:2] <= (3, 12):
        yield Finding("python", OK, text)
    else:
        yield Finding("python", WRONG, text, "use Python 3.8 to 3.12, those that MXNet runs on")
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        what = f"{platform.machine()} {sys.platform}: MXNet 1.9.1 has wheels for x86-64 Linux only"
        yield Finding("python", WRONG, what, "use such a machine, or a container of that platform")
    for path in _hiding():
        what = f"{path} hides the module {path.stem} from programs that run in this folder"
        yield Finding("python", NOTE, what, "rename it")


def _hiding() -> list[Path]:
    """Files of the current folder that Python imports where the module of that name is meant."""
    library = Path(os.__file__).parent
    try:
        here = sorted(Path.cwd().glob("*.py"))
    except OSError:  # the folder was removed
        return []
    ours = {"numpy", "mxnet", "tqdm", "mpi4py"}
    return [path for path in here if path.stem in ours or _is_module(path.stem, library)]


def _is_module(name: str, library: Path) -> bool:
    """Whether the standard library has it; ``test``, Python's own tests, nobody else imports."""
    known = (library / f"{name}.py").exists() or (library / name / "__init__.py").exists()
    return known and name != "test"


def numpy() -> Iterator[Finding]:
    """Whether NumPy is there, works, and is older than 2."""
    facts, failure = probes.ask("numpy")
    if failure:
        yield Finding("numpy", WRONG, f"cannot be used: {failure}", "pip install 'numpy<2'")
        return
    text = f"{facts['version']} at {facts['file']}"
    if not facts["adds"]:
        yield Finding("numpy", WRONG, f"{text} adds 1+1+1 to something else", "reinstall it")
    elif int(facts["version"].split(".")[0]) >= 2:
        why = f"{text}; MXNet 1.9.1 needs one before 2"
        yield Finding("numpy", WRONG, why, "pip install 'numpy<2'")
    else:
        yield Finding("numpy", OK, text)


def mxnet() -> Iterator[Finding]:
    """Whether MXNet is there, once, imports, computes, and is the release that is expected."""
    if wheels.package() is None:
        remedy = f"{CPU}; or {CUDA}, with NVIDIA GPUs"
        yield Finding("mxnet", WRONG, f"there is no MXNet in {sys.prefix}", remedy)
        return
    installed = wheels.installed()
    if len(installed) > 1:
        yield Finding(
            "mxnet",
            WRONG,
            f"{' and '.join(installed)} are both installed; they overwrite each other's files",
            f"pip uninstall -y {' '.join(installed)}, then one of {CPU} and {CUDA}",
        )
        return
    facts, failure = probes.ask("mxnet")
    if failure:
        what = f"{' '.join(installed) or 'MXNet'} cannot be used: {failure}"
        yield Finding("mxnet", WRONG, what, f"if that names none: install again, {CPU} or {CUDA}")
        return
    text = f"{facts['version']} ({', '.join(installed) or 'no wheel'}) at {facts['file']}"
    if not facts["adds"]:
        yield Finding("mxnet", WRONG, f"{text} adds 1+1+1 to something else", "reinstall it")
    elif facts["version"] != "1.9.1":
        yield Finding("mxnet", WRONG, f"{text}; gluonpar is made for 1.9.1", f"{CPU} or {CUDA}")
    else:
        built = "with CUDA" if facts["cuda"] else "without CUDA"
        yield Finding("mxnet", OK, f"{text}, {built}; sees {facts['num_gpus']} GPUs")
    if "cuda_fails" in facts:
        text = f"MXNet cannot use any GPU, since CUDA does not answer it: {facts['cuda_fails']}"
        remedy = "see what `driver` says below; CPU devices compute all the same (--device cpu)"
        yield Finding("mxnet", WRONG, text, remedy)


def settings() -> Iterator[Finding]:
    """What the environment sets, and whether it overrides what gluonpar would set."""
    wanted, failure = probes.ask("settings")
    if failure:
        yield Finding(
            "settings", WRONG, f"gluonpar.runtime.startup fails: {failure}", "see numpy, mxnet"
        )
    for name, value in wanted.items():
        mine = os.environ.get(name)
        if mine is None or mine == value:
            yield Finding("settings", OK, f"{name}={value}, by gluonpar")
        else:
            text = f"{name}={mine} in the environment overrides gluonpar's {value}"
            yield Finding("settings", NOTE, text, f"unset {name}, unless you measured it")
    malloc = [n for n in os.environ if n.startswith("MALLOC_") or n == "GLIBC_TUNABLES"]
    if not malloc:
        yield Finding("settings", OK, "malloc keeps large arrays in the heap, by gluonpar")
    for name in sorted(os.environ):
        if name not in wanted and (name in _NAMES or name.startswith(_PREFIXES)):
            text = f"{name}={os.environ[name]} is set in the environment"
            yield Finding("settings", NOTE, text, _REMEDIES.get(name, ""))


_REMEDIES = {
    "MXNET_ENGINE_TYPE": "NaiveEngine runs one operator at a time, so devices wait for each other; "
    "unset it, unless you are looking for an error",
    "OMP_NUM_THREADS": "every device takes so many threads, where gluonpar would share the "
    "processors out; unset it, unless that is what you want",
    "MXNET_OMP_MAX_THREADS": "every device takes so many threads, where gluonpar would share the "
    "processors out; unset it, unless that is what you want",
}


def threads() -> Iterator[Finding]:
    """Processors this process may use, against those it sees and the threads it asks for."""
    allowed, present, quota = len(os.sched_getaffinity(0)), os.cpu_count() or 1, cpu_quota()
    limited = "" if quota is None else f", of which a cgroup lets it use {quota:g}"
    yield Finding("threads", OK, f"{allowed} of {present} processors{limited}")
    load = probes.load_average()
    if load > allowed:
        text = f"other programs compete for them: the load average is {load:.1f}"
        yield Finding(
            "threads", NOTE, text, "measure times when the machine has nothing else to do"
        )
    if quota is not None and quota < allowed:
        text = f"{allowed} threads will compute in the time of {quota:g} processors"
        remedy = f"start with taskset -c 0-{max(0, int(quota) - 1)}, or give the container more"
        yield Finding("threads", NOTE, text, remedy)
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.isdecimal() and int(asked) > allowed:
        text = f"OMP_NUM_THREADS={asked} threads a device for {allowed} processors"
        yield Finding("threads", NOTE, text, "unset OMP_NUM_THREADS")


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that control groups (v2 or v1) grant; None: no limit."""
    limits = []
    own = _read(root / "proc/self/cgroup").splitlines()
    inside = [line.split(":", 2)[2].lstrip("/") for line in own if line.count(":") >= 2]
    for group in {part for path in inside for part in _upwards(path)} | {""}:
        whole = _read(root / "sys/fs/cgroup" / group / "cpu.max").split()
        v1 = root / "sys/fs/cgroup/cpu" / group
        whole = whole or [_read(v1 / f"cpu.cfs_{what}_us") for what in ("quota", "period")]
        if len(whole) == 2 and all(number.isdecimal() for number in whole) and int(whole[1]):
            limits.append(int(whole[0]) / int(whole[1]))
    return min(limits, default=None)


def _upwards(group: str) -> list[str]:
    """The group and those it is in, as paths."""
    parts = Path(group).parts
    return [str(Path(*parts[:i])) for i in range(1, len(parts) + 1)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # this kernel has no such file, or does not show it: no limit is known
        return ""


def shared_memory(folder: str = "/dev/shm") -> Iterator[Finding]:
    """The size of /dev/shm, through which MPI's processes and DataLoader's workers speak."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        remedy = "mount a tmpfs there; needed for MPI on one machine and DataLoader's workers only"
        yield Finding("shared memory", NOTE, f"none: {error}", remedy)
        return
    text = f"{folder} has {usage.total >> 20} MiB, {usage.free >> 20} MiB free"
    if usage.free < SHM_BYTES:
        remedy = f"docker run --shm-size=1g, or mount -o remount,size=1G {folder}"
        yield Finding("shared memory", NOTE, f"{text}: little for MPI on one machine", remedy)
    else:
        yield Finding("shared memory", OK, text)


def data() -> Iterator[Finding]:
    """Where Fashion-MNIST is; nothing is downloaded."""
    facts, failure = probes.ask("data")
    if failure:
        remedy = "put the files in order, or name another folder with --data-dir"
        yield Finding("data", WRONG, f"Fashion-MNIST cannot be read: {failure}", remedy)
    elif "found" in facts:
        yield Finding("data", OK, f"Fashion-MNIST in {facts['found']}")
    else:
        text = f"Fashion-MNIST is in none of {', '.join(facts['tried'])}"
        remedy = "training downloads it; or apt-get install dataset-fashion-mnist; or --data-dir"
        yield Finding("data", NOTE, text, remedy)


def mpi() -> Iterator[Finding]:
    """mpi4py and mpirun, which several processes need and one does not, and whether they match."""
    remedy = "for several processes: pip install 'gluonpar[mpi]'"
    if importlib.util.find_spec("mpi4py") is None:
        yield Finding("mpi", NOTE, "no mpi4py, so one process only", remedy)
        return
    facts, failure = probes.ask("mpi")
    if failure:
        yield Finding("mpi", WRONG, f"mpi4py is there, but {failure}", remedy)
        return
    yield Finding("mpi", OK, f"mpi4py {facts['mpi4py']} with {facts['library']}")
    if "starter" not in facts:
        yield Finding("mpi", NOTE, "no mpirun, so no several processes", remedy)
        return
    text = f"mpirun is {facts['starter']}, {facts['starter_says']!r}"
    if (facts["vendor"] == "Open MPI") == ("Open MPI" in facts["starter_says"]):
        yield Finding("mpi", OK, text)
    else:
        why = f"{text}: another MPI than mpi4py's, so each process would be alone in its world"
        yield Finding("mpi", WRONG, why, "use the mpirun of the same MPI, by its full path")
