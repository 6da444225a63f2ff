"""Prepares the process for MXNet: NumPy's former names, CUDA's libraries, settings.

``import gluonpar`` calls :func:`install`, which imports neither MXNet nor NumPy. When MXNet is
imported, by the program or by :func:`start`, the process is prepared before, and afterwards the
modules of gluonpar that extend MXNet's classes are imported. Variables of the environment that are
set stay as they are.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import platform
import sys
import types
from typing import Any

from gluonpar.install import compatibility, driver, wheels

INSTALL = (
    f"install one of the two: {wheels.CPU} (any x86-64 Linux machine) or {wheels.CUDA} (NVIDIA "
    "GPUs of compute capability 5.0 to 8.9)"
)

# How often libgomp's threads look for work before they sleep. By default it is 300,000 times, some
# milliseconds in which another program, or another context's threads, could compute.
SPIN = {"GOMP_SPINCOUNT": "1000"}

# MXNet with CUDA counts the GPUs in the first backward, also on CPU devices, only to print hints,
# and fails there if the driver does. gluonpar.runtime.devices gives the hints.
CUDA_SETTINGS = {"MXNET_CUDA_LIB_CHECKING": "0", "MXNET_CUDNN_LIB_CHECKING": "0"}

# MXNet compiles the elementwise operators of a graph into one kernel, in the first step, by NVRTC.
# For this the driver must be as new as NVRTC; for all else in MXNet any driver of CUDA 11 will do.
WITHOUT_FUSION = {"MXNET_USE_FUSION": "0"}

# The packages that extend MXNet's classes, and the names in gluonpar that do without MXNet.
_EXTEND = "gluonpar.adapters", "gluonpar.batch_norm", "gluonpar.gluon"
_WITHOUT_MXNET = {"__main__", "diagnostics", "install", "options", "plans", "training"}


def install() -> None:
    """Prepare the process when MXNet is imported, or now, if it has been."""
    compatibility.install(_prepare, _extend)
    if "mxnet" in sys.modules:
        start()
        _prepare()  # for child processes
        _extend()
    else:
        sys.meta_path.insert(0, _Finder())


@functools.lru_cache(None)
def start() -> None:
    """Import MXNet; a second call does nothing.

    Raises ImportError, with the remedy, if MXNet is missing, installed twice or cannot be imported,
    or if the machine is not x86-64.
    """
    if platform.machine() != "x86_64":
        raise ImportError(
            f"gluonpar needs an x86-64 machine, got {platform.machine()}: it reads MXNet's arrays "
            "from memory, and their layout was checked there only."
        )
    wheel = _installed_wheel()
    try:
        import mxnet  # noqa: F401
    except Exception as error:  # damaged files may raise any exception
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise ImportError(f"{wheel} cannot be loaded: {reason}. {_remedy(error, wheel)}") from error


def _prepare() -> None:
    for name, value in settings().items():
        os.environ.setdefault(name, value)
    if wheels.need_cuda():
        wheels.load_cuda_libraries()
    # MXNet imports it last, and it may run lscpu. Under Python 3.8 and 3.9 that forks, at which
    # MXNet stops and starts its engine; the number of threads could no longer be set.
    importlib.import_module("numpy.testing")


def _extend() -> None:
    for name in _EXTEND:
        importlib.import_module(name)


class _Finder(importlib.abc.Loader):
    """Imports MXNet before a module of gluonpar that needs it.

    Otherwise that module would import MXNet, and :func:`_extend` would find it incomplete. If
    :func:`_extend` has imported the very module that Python looks for, it is not run again.
    """

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        package, *place = name.split(".")
        if package != "gluonpar" or place[0] in _WITHOUT_MXNET or "mxnet" in sys.modules:
            return None
        start()
        if name not in sys.modules:
            return None
        module, spec = sys.modules[name], importlib.machinery.ModuleSpec(name, self)
        # Python would prefer the module's own spec to one that is returned.
        spec.loader_state, module.__spec__ = module.__spec__, spec
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = module.__spec__ and module.__spec__.loader_state  # its own again


def settings() -> dict[str, str]:
    """Return the environment variables that this MXNet needs, unless the user has set them."""
    wanted = {} if "OMP_WAIT_POLICY" in os.environ else SPIN
    if not wheels.need_cuda():
        return wanted
    return {**wanted, **CUDA_SETTINGS, **({} if _fusion_works() else WITHOUT_FUSION)}


def _fusion_works() -> bool:
    """Return whether the driver accepts what the process's CUDA compiler makes."""
    if os.environ.get("GLUONPAR_CUDA") == "system":  # the compiler may have any version
        return False
    try:
        return driver.cuda_version() >= (11, 8)  # the version of nvidia-cuda-nvrtc-cu11
    except driver.DriverError:
        return True  # no GPU will be used


def _installed_wheel() -> str:
    """Return the name of the one MXNet wheel that is installed: ``mxnet``, ``mxnet-cu112``, ..."""
    package, names = wheels.package(), wheels.installed()
    if package is None:
        raise ImportError(f"gluonpar needs MXNet 1.9.1 and finds none in {sys.prefix}; {INSTALL}.")
    if len(names) > 1:
        raise ImportError(
            f"{' and '.join(names)} are both installed in {package.parent}; they overwrite each "
            f"other's files. Remove them all: pip uninstall -y {' '.join(names)}, then {INSTALL}."
        )
    return names[0] if names else "mxnet"


def _remedy(error: Exception, wheel: str) -> str:
    """Return the remedy for an exception that the import of MXNet raised."""
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("mxnet"):
        return f"Remedy: pip install {error.name}."
    if "libcuda.so" in str(error):
        cpu = f"pip uninstall -y mxnet-cu112, then {wheels.CPU}"
        return f"libcuda.so.1 is part of NVIDIA's driver. Without it, use the CPU wheel: {cpu}."
    if any(name in str(error) for name in wheels.CUDA_LIBRARIES):
        return "In a clone of gluonpar, pip install -e '.[cu112]' installs CUDA 11's libraries."
    missing = wheels.missing_libraries()
    if missing:
        packages = " ".join(wheels.GCC_PACKAGES[name] for name in missing)
        return f"It needs gcc's libraries; on Debian and Ubuntu: apt-get install {packages}."
    # A plain `pip install` would leave damaged files as they are.
    return f"Reinstall it: pip install --force-reinstall --no-deps {wheel}==1.9.1."
