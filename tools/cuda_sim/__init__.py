"""Simulated GPUs for a process, and what the process can ask them: all that other code may import.

A process needs the variables before it starts, since the loader reads LD_LIBRARY_PATH only then::

    subprocess.run([python, "train.py"], env={**os.environ, **environment(num_devices=4)})

and inside it, counters() says what was copied and launched, and timeline() when and where.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
from typing import NamedTuple

from .build import DEFAULT_FOLDER

__all__ = ["Count", "Operation", "counters", "environment", "reset", "timeline"]

_OPTIONS = (
    "atomics",
    "bytes",
    "capability",
    "delays",
    "driver",
    "fail_after",
    "link",
    "log",
    "nvrtc",
    "peers",
    "tf32",
    "timeline",
    "trace",
)


class Count(NamedTuple):
    """How many times something happened, and with how many bytes in all."""

    times: int
    num_bytes: int


class Operation(NamedTuple):
    """One operation of a stream: its name, where it ran, and from when to when in seconds.

    Stream 0 is the device's default stream; the others are numbered as they were created.
    """

    name: str
    device: int
    stream: int
    begin: float
    end: float


class _Operation(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_int),
        ("begin", ctypes.c_double),
        ("end", ctypes.c_double),
    ]


def environment(
    num_devices: int = 2, folder: pathlib.Path = DEFAULT_FOLDER, **options: object
) -> dict[str, str]:
    """Return the variables with which a process sees ``num_devices`` simulated GPUs.

    ``folder`` is that of build.py. The options, all of which have a default:

    - ``atomics``: 1 makes cuDNN prefer gradients that are summed in a random order (0)
    - ``bytes``: memory per device; cudaMalloc fails beyond it (4 GiB)
    - ``capability``: compute capability, such as "9.0", for which the wheel has no kernels ("8.6")
    - ``peers``: which GPUs can access each other: "all", "none" or pairs as in "0-1,2-3" ("all")
    - ``delays``: a seed; each operation of a stream starts after a random short delay (none)
    - ``fail_after``: "device:launches": the device fails at the launch after so many (never)
    - ``driver``: the driver's version, which decides on CUDA's and PTX's ("550.54.14")
    - ``nvrtc``: the version of CUDA that NVRTC is of, "11.2" to "11.8" ("11.8")
    - ``link``: bytes per second of a copy between two devices, and of NCCL, at most (no limit)
    - ``log``: a file to which the simulator's last words are appended, too, as pytest hides
      what a process that dies has written (none)
    - ``tf32``: 1 rounds the factors of float32 products to TF32, unless NVIDIA_TF32_OVERRIDE=0 is
      set when the library is loaded (0)
    - ``timeline``: 1 keeps what timeline() returns (0)
    - ``trace``: 1 prints each operation as it is enqueued (0)
    """
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ValueError(f"options must be among {', '.join(_OPTIONS)}, got {', '.join(unknown)}")
    before = os.environ.get("LD_LIBRARY_PATH")
    libraries = str(folder / "lib")
    return {
        "LD_LIBRARY_PATH": f"{libraries}:{before}" if before else libraries,
        "GLUONPAR_CUDA": "system",
        "MXNET_CUDNN_LIB_CHECKING": "0",
        "CUDA_SIM_CACHE": str(folder / "kernels"),
        "CUDA_SIM_DEVICES": str(num_devices),
        **{f"CUDA_SIM_{name.upper()}": str(value) for name, value in options.items()},
    }


def counters() -> dict[str, Count]:
    """Return what this process has counted since it started or since reset().

    "kernel" counts launches, the copies are "H2D pinned", "H2D pageable", "D2H pinned",
    "D2H pageable", "D2D" (within a device), "peer direct" and "peer staged", and the functions of
    CUDA that cost time go by their names, such as "cudaMalloc" and "cudaStreamSynchronize".
    """
    library = _library()
    length = library.cuda_sim_names(None, 0)
    text = ctypes.create_string_buffer(length + 1)
    library.cuda_sim_names(text, length + 1)
    names = text.value.decode().splitlines()
    return {name: _count(library, name) for name in names}


def timeline() -> list[Operation]:
    """Return the operations of all streams in the order in which they ended."""
    library = _library()
    number = library.cuda_sim_timeline(None, 0)
    operations = (_Operation * number)()
    library.cuda_sim_timeline(operations, number)
    return [
        Operation(one.name.decode(), one.device, one.stream, one.begin, one.end)
        for one in operations
    ]


def reset() -> None:
    """Set all counters to zero, and empty the timeline."""
    _library().cuda_sim_reset()


def _count(library: ctypes.CDLL, name: str) -> Count:
    encoded = name.encode()
    return Count(library.cuda_sim_count(encoded), int(library.cuda_sim_bytes(encoded)))


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcudart.so.11.0")
    if not hasattr(library, "cuda_sim_count"):
        raise RuntimeError("this process uses a real CUDA; start it with environment()'s variables")
    library.cuda_sim_count.restype = ctypes.c_long
    library.cuda_sim_bytes.restype = ctypes.c_double
    library.cuda_sim_names.restype = library.cuda_sim_timeline.restype = ctypes.c_size_t
    library.cuda_sim_names.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.cuda_sim_timeline.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
