"""The CUDA 11 libraries from PyPI, loaded into the process before MXNet looks for them.

The ``nvidia-*-cu11`` wheels put their libraries under ``site-packages/nvidia/*/lib``, where the
loader does not look. A library that is loaded by its full path with RTLD_GLOBAL satisfies a later
request for the same soname, so mxnet-cu112 finds them all without LD_LIBRARY_PATH and without a
CUDA toolkit. Where the machine has a toolkit too, PyPI's come first, unless the environment says
``GLUONPAR_CUDA=system``.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sysconfig

CHOICE = "GLUONPAR_CUDA"
SOURCES = ("pypi", "system")

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


def preferred() -> str:
    """Whose libraries come first: 'pypi', or 'system' if the environment says GLUONPAR_CUDA=system.

    ValueError for another value of the variable; unset and empty are 'pypi'.
    """
    chosen = os.environ.get(CHOICE) or SOURCES[0]
    if chosen not in SOURCES:
        raise ValueError(f"{CHOICE}={chosen} is none of {', '.join(SOURCES)}; set one, or unset it")
    return chosen


def load_libraries(site: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Load every library of :data:`LIBRARIES` from where :func:`preferred` says; those loaded.

    'pypi': those that PyPI's wheels brought, by their paths; one that is missing there is left to
    the system's loader, which names it if it has none either. 'system': those that the system's
    loader finds (LD_LIBRARY_PATH, ldconfig), by their names, and of the rest those of PyPI's wheels
    that are there. OSError if one of PyPI's is damaged; ValueError as :func:`preferred`.
    """
    from_system = preferred() == "system"
    found = []
    for name in LIBRARIES:
        if from_system and _load(pathlib.Path(name)):
            found.append(pathlib.Path(name))
            continue
        for path in in_wheels(name, site):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            found.append(path)
    return found


def in_wheels(name: str, site: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Paths of the library ``name`` among what PyPI's wheels installed: one, or none."""
    root = (site or pathlib.Path(sysconfig.get_path("purelib"))) / "nvidia"
    return list(root.glob(f"*/lib/{name}"))


def _load(name: pathlib.Path) -> bool:
    try:
        ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL)
    except OSError:  # the system has none, or one that cannot be loaded: PyPI's is next
        return False
    return True
