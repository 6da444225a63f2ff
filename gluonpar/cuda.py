"""The CUDA 11 libraries from PyPI, loaded into the process before MXNet looks for them.

The ``nvidia-*-cu11`` wheels put their libraries under ``site-packages/nvidia/*/lib``, where the
loader does not look. A library that is loaded by its full path with RTLD_GLOBAL satisfies a later
request for the same soname, so mxnet-cu112 finds them all without LD_LIBRARY_PATH and without a
CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import pathlib
import sysconfig

# In order of dependency: each needs only those before it.
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
)


def load_libraries(site: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Load every library of :data:`LIBRARIES` that PyPI's wheels brought; return their paths.

    One that is missing here is left to the system's loader, which names it if it has none either.
    """
    root = (site or pathlib.Path(sysconfig.get_path("purelib"))) / "nvidia"
    found = [path for name in LIBRARIES for path in root.glob(f"*/lib/{name}")]
    for path in found:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return found
