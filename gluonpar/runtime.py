"""What must be so before MXNet's first operator: NumPy's alias, CUDA's libraries, pool and malloc.

``import gluonpar`` calls :func:`start` once, before anything else of the package. A setting that
the user made in the environment is never overridden; one that comes too late is reported once, in
words. Everything here is private to MXNet 1.9.1, its last release, and so will not change any more.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pathlib
import sys
import warnings

import numpy as np

from gluonpar import cuda

INSTALL = (
    "install one of the two: pip install 'gluonpar[cpu]' (any x86-64 Linux machine) or "
    "pip install 'gluonpar[cu112]' (NVIDIA GPUs of compute capability 5.0 to 8.9)"
)

# Operators of all CPU contexts share one pool of temporary workspaces. With MXNet's 4 entries two
# contexts soon draw the same entry and wait for each other; 64 entries make that rare.
SETTINGS = {"MXNET_CPU_TEMP_COPY": "64"}

# glibc's mallopt: keep large arrays inside the heap instead of an mmap, page faults and an munmap
# each.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MALLOC_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

# The C++ guard of the thread-local store that holds the workspace pool: its first byte turns 1 when
# the first operator asks for a resource, and the pool's size is fixed from then on.
_POOL_GUARD = (
    "_ZGVZN4dmlc16ThreadLocalStoreIN5mxnet8resource19ResourceManagerImplEE9SingletonEvE4inst"
)


def start() -> None:
    """Prepare the process for MXNet and import it, or raise ImportError with the remedy."""
    imported_before = "mxnet" in sys.modules
    _alias_numpy_bool()
    wheel = _installed_wheel()
    missing = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    os.environ.update(missing)
    _keep_large_arrays_in_the_heap()
    if not imported_before:
        if wheel != "mxnet":
            cuda.load_libraries()
        _import_mxnet(wheel)
    elif missing and _pool_exists():
        late = ", ".join(f"{name}={value}" for name, value in missing.items())
        warnings.warn(
            f"MXNet had run operators before gluonpar was imported: too late for {late}, so "
            "devices on the CPU will wait for each other. Import gluonpar first, or set it in the "
            "environment.",
            RuntimeWarning,
            stacklevel=3,
        )


def _alias_numpy_bool() -> None:
    """MXNet 1.9.1 reads ``numpy.bool`` when imported; NumPy 1.24 removed it, 1.20 to 1.23 warn."""
    if "bool" not in vars(np):
        np.bool = bool


def _installed_wheel() -> str:
    """Name of the one MXNet wheel that is installed: ``mxnet``, ``mxnet-cu112``, ..."""
    spec = importlib.util.find_spec("mxnet")
    if spec is None or not spec.origin:
        raise ImportError(f"gluonpar needs MXNet 1.9.1 and finds none in {sys.prefix}; {INSTALL}.")
    site = pathlib.Path(spec.origin).parent.parent
    wheels = {
        info.name.rsplit("-", 2)[0].replace("_", "-") for info in site.glob("mxnet*-*.dist-info")
    }
    if len(wheels) > 1:
        found = " and ".join(sorted(wheels))
        raise ImportError(
            f"{found} are both installed in {site}; they overwrite each other's files. Remove them "
            f"all: pip uninstall -y {' '.join(sorted(wheels))}, then {INSTALL}."
        )
    return wheels.pop() if wheels else "mxnet"


def _import_mxnet(wheel: str) -> None:
    try:
        import mxnet  # noqa: F401
    except OSError as error:
        raise ImportError(f"{wheel} cannot be loaded: {error}. {_remedy(str(error))}") from error
    except ModuleNotFoundError as error:
        remedy = f"pip install {'setuptools' if error.name == 'distutils' else error.name}"
        raise ImportError(f"{wheel} cannot be imported: {error}. Remedy: {remedy}.") from error


def _remedy(error: str) -> str:
    if "libcuda.so" in error:
        return (
            "libcuda.so.1 is NVIDIA's driver and comes with it. Without an NVIDIA GPU and driver "
            "use the CPU wheel: pip uninstall -y mxnet-cu112, then pip install 'gluonpar[cpu]'."
        )
    if "libgomp" in error:
        return "libgomp is gcc's OpenMP library; on Debian and Ubuntu: apt-get install libgomp1."
    return f"Reinstall it: {INSTALL}."


def _keep_large_arrays_in_the_heap() -> None:
    if any(name in os.environ for name in _MALLOC_BY_USER):
        return
    mallopt = getattr(
        ctypes.CDLL(None), "mallopt", None
    )  # glibc has it, other C libraries need not
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _pool_exists() -> bool:
    """Whether an operator has run, and so fixed the size of the workspace pool."""
    from mxnet.base import _LIB

    try:
        return bool(ctypes.c_uint8.in_dll(_LIB, _POOL_GUARD).value)
    except ValueError:  # not the 1.9.1 wheel: the symbol is not there, so nothing can be said
        return False
