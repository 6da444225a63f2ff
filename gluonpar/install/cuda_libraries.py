"""The CUDA 11 libraries from PyPI, loaded into the process before MXNet looks for them.

The ``nvidia-*-cu11`` wheels install them under ``site-packages/nvidia/*/lib``, where the loader
does not look. A library loaded by its path with RTLD_GLOBAL satisfies later requests for the same
soname, so mxnet-cu112 finds them all without LD_LIBRARY_PATH and without a CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import struct
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

# A program header of ELF-64: type, flags, offset, two addresses, length in file and in memory, ...
_SEGMENT = struct.Struct("<2L6Q")


class LibraryError(OSError):
    """A CUDA library is damaged, or not where it was looked for; ``remedy`` is a sentence."""

    def __init__(self, message: str, remedy: str):
        super().__init__(message)
        self.remedy = remedy


def load_libraries() -> None:
    """Load all :data:`LIBRARIES`, each as :func:`load` does."""
    for name in LIBRARIES:
        load(name)


def load(name: str) -> pathlib.Path:
    """Load one library for the whole process; return its path, or its name if it is not there.

    With GLUONPAR_CUDA unset or 'pypi': the one from PyPI's wheels. With 'system': the one that the
    system's loader finds (LD_LIBRARY_PATH, ldconfig), whose name is returned, or else PyPI's, since
    a toolkit has neither cuDNN nor NCCL.

    Raises :class:`LibraryError` if the library is damaged, or the system has no CUDA 11 with
    GLUONPAR_CUDA='system'; ValueError for another value of GLUONPAR_CUDA.
    """
    source = os.environ.get("GLUONPAR_CUDA") or "pypi"
    if source not in ("pypi", "system"):
        raise ValueError(f"GLUONPAR_CUDA must be pypi or system, got {source}; correct or unset it")
    if source == "system":
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return pathlib.Path(name)
        except OSError as error:
            if not str(error).startswith(f"{name}: cannot open shared object file"):
                remedy = "repair that CUDA, or unset GLUONPAR_CUDA to use PyPI's libraries"
                raise LibraryError(f"the system's {name} does not load: {error}", remedy) from error
        if name == LIBRARIES[0]:
            raise LibraryError(
                f"GLUONPAR_CUDA=system, but the system's loader finds no {name}, so no CUDA 11",
                "add its folder, often /usr/local/cuda-11.2/lib64, to LD_LIBRARY_PATH before "
                "Python starts, or unset GLUONPAR_CUDA to use PyPI's libraries",
            )
    for path in in_wheels(name)[:1]:
        wrong = damage(path)
        try:
            if not wrong:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            wrong = str(error)
        if wrong:
            raise LibraryError(f"{path} is damaged: {wrong}", reinstall(path))
        return path
    return pathlib.Path(name)


def in_wheels(name: str) -> list[pathlib.Path]:
    """Return the paths of the library ``name``, or pattern, among the files of PyPI's wheels."""
    return sorted(pathlib.Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/lib/{name}"))


def damage(path: pathlib.Path) -> str:
    """Return the fault of a shared library, as far as its headers show it, or "".

    The system's loader maps a file by its headers; if the file was truncated (a full disk, an
    interrupted copy), the process dies of SIGBUS without a message. Raises OSError if the file
    cannot be read.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            return f"not a shared library ({num_bytes} bytes without an ELF header)"
        segments_at, sections_at = struct.unpack_from("<QQ", header, 32)
        num_segments, section_bytes, num_sections = struct.unpack_from("<3H", header, 56)
        file.seek(segments_at)
        segments = file.read(_SEGMENT.size * num_segments)
    ends = [sections_at + section_bytes * num_sections, segments_at + _SEGMENT.size * num_segments]
    whole = len(segments) // _SEGMENT.size * _SEGMENT.size
    for _, _, offset, _, _, length, _, _ in _SEGMENT.iter_unpack(segments[:whole]):
        ends.append(offset + length)
    if num_bytes < max(ends):
        return f"cut off after {num_bytes} of at least {max(ends)} bytes"
    return ""


def reinstall(path: pathlib.Path) -> str:
    """Return the command that replaces a damaged library of PyPI's."""
    package = path.parent.parent.name.replace("_", "-")
    return f"pip install --force-reinstall --no-deps --no-cache-dir nvidia-{package}-cu11"
