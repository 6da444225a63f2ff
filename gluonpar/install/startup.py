"""Prepare the process for MXNet: NumPy 1, CUDA's libraries, settings.

``import gluonpar`` calls :func:`install`, which imports neither MXNet nor NumPy. The process is
prepared when MXNet is imported, by the program or by :func:`start`. Then gluonpar's modules that
give MXNet's classes something are imported. The environment is never overridden.
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

# How often libgomp's threads look for work before they sleep. Its 300,000 are some milliseconds,
# in which another program, or another context's threads, could compute.
SPIN = {"GOMP_SPINCOUNT": "1000"}

# An MXNet with CUDA counts the GPUs in the first backward of CPU devices too, only to print hints,
# and fails there if the driver does. gluonpar.runtime.devices gives the hints.
CUDA_SETTINGS = {"MXNET_CUDA_LIB_CHECKING": "0", "MXNET_CUDNN_LIB_CHECKING": "0"}

# MXNet compiles the elementwise operators of a graph into one kernel, in the first step, by NVRTC.
# The driver must be as new as NVRTC; for everything else in MXNet any driver of CUDA 11 will do.
WITHOUT_FUSION = {"MXNET_USE_FUSION": "0"}

# What gives MXNet's classes something, and what is imported without MXNet.
_GIVES = "gluonpar.adapters", "gluonpar.batch_norm", "gluonpar.gluon"
_WITHOUT_MXNET = {"__main__", "diagnostics", "install", "options", "plans", "training"}


def install() -> None:
    """Have the process prepared when MXNet is imported; if it has been, give its classes all."""
    compatibility.install(_prepare, _give)
    if "mxnet" in sys.modules:
        start()
        _prepare()  # for child processes
        _give()
    else:
        sys.meta_path.insert(0, _Finder())


@functools.lru_cache(None)
def start() -> None:
    """Import MXNet; a second call does nothing.

    Raises ImportError, with the remedy, if MXNet is missing, installed twice or cannot be imported,
    or if this is no x86-64 machine.
    """
    if platform.machine() != "x86_64":
        raise ImportError(
            f"gluonpar needs an x86-64 machine, got {platform.machine()}: it reads MXNet's arrays "
            "from memory, and their layout was checked there only."
        )
    wheel = _installed_wheel()
    try:
        import mxnet  # noqa: F401
    except Exception as error:  # importing damaged files may raise any
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise ImportError(f"{wheel} cannot be loaded: {reason}. {_remedy(error, wheel)}") from error


def _prepare() -> None:
    for name, value in settings().items():
        os.environ.setdefault(name, value)
    if wheels.need_cuda():
        wheels.load_cuda_libraries()
    # MXNet imports it last, and it may run lscpu. Under Python 3.8 and 3.9 that forks, and MXNet
    # stops and starts its engine at a fork; the number of threads could no longer be set.
    importlib.import_module("numpy.testing")


def _give() -> None:
    for name in _GIVES:
        importlib.import_module(name)


class _Finder:
    """Imports MXNet before a module of gluonpar that needs it.

    Else that module would import MXNet, and be incomplete when :func:`_give` needs it.
    """

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Return a spec of the module if it was imported with MXNet, and None otherwise."""
        package, *place = name.split(".")
        if package != "gluonpar" or place[0] in _WITHOUT_MXNET or "mxnet" in sys.modules:
            return None
        start()
        module = sys.modules.get(name)
        if module is None:
            return None
        # Python takes the spec of a module that is there, and would run it again by its own.
        spec = module.__spec__ = importlib.machinery.ModuleSpec(name, _Imported(module))
        return spec


class _Imported(importlib.abc.Loader):
    """Loads a module that has been imported while it was looked for."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the module."""
        return self.module

    def exec_module(self, module: types.ModuleType) -> None:
        """Keep the module as it is."""
        module.__spec__ = self.spec


def settings() -> dict[str, str]:
    """Return the environment variables that are set, unless set, for this MXNet."""
    wanted = {} if "OMP_WAIT_POLICY" in os.environ else SPIN
    if not wheels.need_cuda():
        return wanted
    return {**wanted, **CUDA_SETTINGS, **({} if _fusion_works() else WITHOUT_FUSION)}


def _fusion_works() -> bool:
    """Return whether the driver accepts the output of the CUDA compiler in the process."""
    if os.environ.get("GLUONPAR_CUDA") == "system":  # a compiler of any version
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
