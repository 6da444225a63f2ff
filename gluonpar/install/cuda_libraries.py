"""The CUDA 11 libraries from PyPI, loaded into the process before MXNet looks for them.

The ``nvidia-*-cu11`` wheels install them under ``site-packages/nvidia/*/lib``, where the loader
does not look. A library loaded by its path with RTLD_GLOBAL satisfies later requests for the same
soname, so mxnet-cu112 finds them all without LD_LIBRARY_PATH and without a CUDA toolkit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import sysconfig

_CUDNN_PARTS = ("ops_infer", "ops_train", "cnn_infer", "cnn_train", "adv_infer", "adv_train")

# In order of dependency: each needs only those before it. cuDNN would load its parts at their first
# use, possibly those of another cuDNN on LD_LIBRARY_PATH: then the process aborts ("Could not load
# symbol cudnnOpsInferVersionCheck"), or the versions do not match.
LIBRARIES = (
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
    *(f"libcudnn_{part}.so.8" for part in _CUDNN_PARTS),
)


def load_libraries() -> None:
    """Load all :data:`LIBRARIES`, each as :func:`load` does."""
    for name in LIBRARIES:
        load(name)


def load(name: str) -> pathlib.Path:
    """Load one library for the whole process; return its path, or its name if it has no path here.

    The library comes from PyPI's wheels, if they are installed. With GLUONPAR_CUDA='system' it is
    the library that the system's loader finds (LD_LIBRARY_PATH, ldconfig), or else PyPI's, since a
    toolkit has neither cuDNN nor NCCL.

    Raises OSError if the library in PyPI's wheels cannot be loaded.
    """
    if os.environ.get("GLUONPAR_CUDA") == "system":
        with contextlib.suppress(OSError):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return pathlib.Path(name)
    for path in pathlib.Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/lib/{name}"):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        return path
    return pathlib.Path(name)
