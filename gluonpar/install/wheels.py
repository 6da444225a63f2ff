"""Finds the installed wheels of MXNet without importing it, and the libraries they link to.

CUDA 11's libraries come from PyPI's ``nvidia-*-cu11`` wheels, in ``site-packages/nvidia/*/lib``,
where the loader does not look. A library loaded by its path with RTLD_GLOBAL satisfies later
requests for the same soname, so mxnet-cu112 finds them without LD_LIBRARY_PATH or a CUDA toolkit.
gcc's libraries are the system's. ``make`` runs this file before anything is installed::

    python -I gluonpar/install/wheels.py    # prints the Debian packages that are missing
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import os
import sys
import sysconfig
from pathlib import Path

# Commands that install MXNet. Its metadata ask for NumPy 1, which has no wheels for Python 3.13, so
# there the extra cu112 has only the CUDA libraries; gluonpar itself requires what MXNet needs.
CPU = "pip install --no-deps mxnet==1.9.1"
CUDA = "in a clone of gluonpar pip install -e '.[cu112]'"
if sys.version_info >= (3, 13):
    CUDA += " and pip install --no-deps mxnet-cu112==1.9.1"

# In order of dependency: each needs only libraries before it. cuDNN would load its parts at their
# first use, possibly another cuDNN's parts on LD_LIBRARY_PATH: then the process aborts ("Could not
# load symbol cudnnOpsInferVersionCheck"), or the versions do not match.
CUDA_LIBRARIES = (
    "libcudart.so.11.0",
    "libcublasLt.so.11",
    "libcublas.so.11",
    "libcufft.so.10",
    "libcurand.so.10",
    "libcusparse.so.11",
    "libcusolver.so.11",
    "libnvrtc.so.11.2",
    "libnvToolsExt.so.1",
    "libnccl.so.2",
    "libcudnn.so.8",
    *(f"libcudnn_{a}_{b}.so.8" for a in ("ops", "cnn", "adv") for b in ("infer", "train")),
)

# gcc's libraries and their Debian packages; minimal systems lack the first two.
GCC_PACKAGES = {
    "libgomp.so.1": "libgomp1",
    "libquadmath.so.0": "libquadmath0",
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
}


def package() -> Path | None:
    """Return the folder of the package ``mxnet`` that would be imported, or None."""
    spec = importlib.machinery.PathFinder.find_spec("mxnet")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def installed() -> list[str]:
    """Return the names of the installed wheels of MXNet, such as "mxnet-cu112".

    The list is empty if MXNet was installed otherwise. Several wheels overwrite each other's files.
    """
    folder = package()
    if folder is None:
        return []
    # mxnet_model_server and others, whose names begin with mxnet, do not install the package mxnet.
    patterns = ("mxnet-*.dist-info", "mxnet_cu*-*.dist-info")
    infos = [info for pattern in patterns for info in folder.parent.glob(pattern)]
    return sorted(info.name.rsplit("-", 2)[0].replace("_", "-") for info in infos)


def need_cuda() -> bool:
    """Return whether an installed wheel of MXNet needs CUDA."""
    return any("-cu" in name for name in installed())


def load_cuda_libraries() -> None:
    """Load all :data:`CUDA_LIBRARIES`, each as :func:`load_cuda_library` does."""
    for name in CUDA_LIBRARIES:
        load_cuda_library(name)


def load_cuda_library(name: str) -> Path:
    """Load one library for the whole process; return its path, or its name if PyPI's is not used.

    The library comes from PyPI's wheels, if they are installed. With GLUONPAR_CUDA='system' it is
    the library that the system's loader finds (LD_LIBRARY_PATH, ldconfig), or else PyPI's, since a
    toolkit has neither cuDNN nor NCCL. Raises OSError if PyPI's library cannot be loaded.
    """
    if os.environ.get("GLUONPAR_CUDA") == "system":
        with contextlib.suppress(OSError):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return Path(name)
    for path in Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/lib/{name}"):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        return path
    return Path(name)


def missing_libraries() -> list[str]:
    """Return the names of gcc's libraries that the system's loader does not load."""
    missing = []
    for name in GCC_PACKAGES:
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(name)
    return missing


if __name__ == "__main__":
    print(*(GCC_PACKAGES[name] for name in missing_libraries()))
