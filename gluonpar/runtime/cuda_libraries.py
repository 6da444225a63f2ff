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
import struct
import sysconfig

CHOICE = "GLUONPAR_CUDA"
SOURCES = ("pypi", "system")

# In order of dependency: each needs only those before it. cuDNN would load its parts at their first
# use, and take another cuDNN's from LD_LIBRARY_PATH: the process ends there ("Could not load symbol
# cudnnOpsInferVersionCheck"), or the versions do not match.
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
    "libcudnn_ops_infer.so.8",
    "libcudnn_ops_train.so.8",
    "libcudnn_cnn_infer.so.8",
    "libcudnn_cnn_train.so.8",
    "libcudnn_adv_infer.so.8",
    "libcudnn_adv_train.so.8",
)
CUDA_ITSELF = LIBRARIES[0]

# A program header of ELF-64: type, flags, offset, two addresses, length in the file and in memory,
# alignment.
_SEGMENT = struct.Struct("<2L6Q")


class CannotLoad(OSError):
    """A CUDA library is damaged, or not where it was asked for; ``remedy`` says what to do."""

    def __init__(self, what: str, remedy: str):
        super().__init__(what)
        self.remedy = remedy


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
    loader finds (LD_LIBRARY_PATH, ldconfig), by their names, and of the rest (a toolkit has neither
    cuDNN nor NCCL) those of PyPI's wheels that are there.

    :class:`CannotLoad`: a library is there and damaged, or the system has no CUDA 11 and was asked
    for it. ValueError as :func:`preferred`.
    """
    return [path for name in LIBRARIES for path in load(name, site)]


def load(name: str, site: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Load one library for the whole process; errors as :func:`load_libraries`.

    Its path, if it is one of PyPI's; its name, if the system's loader found it; [] if neither has
    it.
    """
    if preferred() == "system":
        if _load_from_system(name):
            return [pathlib.Path(name)]
        if name == CUDA_ITSELF:
            raise CannotLoad(
                f"{CHOICE}=system, but the system's loader finds no {name}, so no CUDA 11",
                "put its folder, often /usr/local/cuda-11.2/lib64, on LD_LIBRARY_PATH before "
                f"Python starts, or unset {CHOICE} to take PyPI's libraries",
            )
    found = in_wheels(name, site)
    for path in found:
        _load_from_wheel(path)
    return found


def in_wheels(name: str, site: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Paths of the library ``name`` among what PyPI's wheels installed: one, or none.

    ``name`` may be a pattern such as ``lib*.so*``, for all of them.
    """
    root = (site or pathlib.Path(sysconfig.get_path("purelib"))) / "nvidia"
    return sorted(root.glob(f"*/lib/{name}"))


def damage(path: pathlib.Path) -> str:
    """What is wrong with a shared library, as far as its headers tell; "" if it is whole.

    The system's loader maps a file by its headers, and where the file was cut off (a full disk, an
    interrupted copy) the process dies of SIGBUS at once, with no word. OSError if it cannot be
    read.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            return f"no shared library ({num_bytes} bytes that do not begin as one)"
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


def package_of(path: pathlib.Path) -> str:
    """The wheel that brought a library, as pip names it.

    >>> package_of(pathlib.Path("nvidia/cuda_runtime/lib/libcudart.so.11.0"))
    'nvidia-cuda-runtime-cu11'
    """
    return f"nvidia-{path.parent.parent.name.replace('_', '-')}-cu11"


def reinstall(path: pathlib.Path) -> str:
    """The command that puts a damaged library of PyPI's right."""
    return f"pip install --force-reinstall --no-deps --no-cache-dir {package_of(path)}"


def _load_from_wheel(path: pathlib.Path) -> None:
    wrong = damage(path)
    if not wrong:
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            return
        except OSError as error:
            wrong = str(error)
    raise CannotLoad(f"{path} is damaged: {wrong}", reinstall(path))


def _load_from_system(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if str(error).startswith(f"{name}: cannot open shared object file"):
            return False  # the system has none
        raise CannotLoad(
            f"the system's {name} does not load: {error}",
            f"repair that CUDA, or unset {CHOICE} to take PyPI's libraries",
        ) from error
    return True
