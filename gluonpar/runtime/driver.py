"""The GPUs of this machine, as the NVIDIA driver itself reports them.

This module is asked before MXNet is installed (tools/choose_extra.py) and before it is imported
(to explain what is missing), so it uses the standard library only, and works when it is loaded by
its file's path without the package around it. It speaks to libcuda.so.1, the part of the driver
that every CUDA program loads, and therefore sees what MXNet will see: CUDA_VISIBLE_DEVICES is
applied by libcuda itself. `nvidia-smi` ignores that variable, and may not be installed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libcuda.so.1"

# The wheel mxnet-cu112 1.9.1 holds machine code for sm_50, 60, 70, 80 and 86, and no PTX that a
# driver could translate for anything else. Machine code runs on its own and on later minor
# versions of the same major version: 8.9 runs the code for 8.6, and 9.0 has nothing to run.
OLDEST_CAPABILITY = (5, 0)
NEWEST_CAPABILITY = (8, 9)

# The driver must know CUDA 11. Any 11.x does: minor versions are compatible within a major one.
OLDEST_CUDA = (11, 0)

_NO_DEVICE = 100
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_REMEDIES = {
    34: "this libcuda.so.1 is the CUDA toolkit's stub; take its folder off LD_LIBRARY_PATH",
    802: "the system is not ready yet; on machines with NVSwitch start nvidia-fabricmanager",
    803: "libcuda.so.1 and the loaded kernel module are of different versions, usually after an "
    "update; restart the machine, or give the container the host's libcuda.so.1",
    804: "this libcuda.so.1 is a forward-compatibility one, which this GPU does not take; take "
    "its folder (often cuda/compat) off LD_LIBRARY_PATH",
    999: "often the kernel module nvidia_uvm is not loaded; running nvidia-smi or restarting the "
    "machine loads it",
}


class DriverMissing(OSError):
    """libcuda.so.1 cannot be loaded: there is no NVIDIA driver, or a container does not see it."""


class DriverError(RuntimeError):
    """A call of the driver failed; `code` is its CUresult (803, 999, ...)."""

    def __init__(self, function: str, code: int):
        remedy = _REMEDIES.get(code, "nvidia-smi may say more")
        super().__init__(f"the NVIDIA driver's {function} failed with error {code}: {remedy}")
        self.code = code


@dataclass(frozen=True)
class Gpu:
    """One GPU: its index (MXNet's `mx.gpu(index)`), name and compute capability, e.g. (7, 5).

    >>> print(Gpu(0, "Tesla T4", (7, 5)))
    gpu 0 Tesla T4, compute capability 7.5
    """

    index: int
    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"gpu {self.index} {self.name}, compute capability {version(self.capability)}"


def version(pair: tuple[int, int]) -> str:
    """Two numbers as a version is written.

    >>> version((11, 2))
    '11.2'
    """
    return f"{pair[0]}.{pair[1]}"


def usable(gpu: Gpu) -> bool:
    """Whether mxnet-cu112 1.9.1 has kernels for this GPU: capability 5.0 to 8.9.

    >>> usable(Gpu(0, "Tesla T4", (7, 5))), usable(Gpu(1, "NVIDIA H200", (9, 0)))
    (True, False)
    """
    return OLDEST_CAPABILITY <= gpu.capability <= NEWEST_CAPABILITY


def load() -> ctypes.CDLL:
    """Load the driver's library; raises DriverMissing, with the loader's own words, if it can't."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverMissing(
            f"no NVIDIA driver here: {error}. Without a GPU, use CPU devices; with one, install "
            "its driver, or start the container with the GPUs (docker run --gpus all)"
        ) from error


def cuda_version(library: Any = None) -> tuple[int, int]:
    """Return the newest CUDA version the driver knows, e.g. (12, 4).

    Raises DriverMissing where there is no driver and DriverError where it does not answer.
    """
    library = load() if library is None else library
    number = ctypes.c_int()
    _call(library, "cuDriverGetVersion", ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def gpus(library: Any = None) -> list[Gpu]:
    """Return the GPUs that programs may use, in CUDA's order; an empty list where there are none.

    An empty list means that the driver is there and shows no GPU: none is in the machine, or
    CUDA_VISIBLE_DEVICES hides them. `library` stands in for libcuda.so.1 in tests. This starts CUDA
    in the process (cuInit), so a process forked from it later cannot use a GPU.

    Raises DriverMissing where there is no driver and DriverError (naming the code, such as 803 for
    a library and a kernel module of different versions) where it does not answer.
    """
    library = load() if library is None else library
    try:
        _call(library, "cuInit", 0)
    except DriverError as error:
        if error.code == _NO_DEVICE:
            return []
        raise
    count = ctypes.c_int()
    _call(library, "cuDeviceGetCount", ctypes.byref(count))
    return [_gpu(library, index) for index in range(count.value)]


def _gpu(library: Any, index: int) -> Gpu:
    device = ctypes.c_int()
    _call(library, "cuDeviceGet", ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    _call(library, "cuDeviceGetName", name, len(name), device)
    major = _attribute(library, _CAPABILITY_MAJOR, device)
    minor = _attribute(library, _CAPABILITY_MINOR, device)
    return Gpu(index, name.value.decode(errors="replace"), (major, minor))


def _attribute(library: Any, attribute: int, device: ctypes.c_int) -> int:
    number = ctypes.c_int()
    _call(library, "cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
    return number.value


def _call(library: Any, function: str, *arguments: Any) -> None:
    code = getattr(library, function)(*arguments)
    if code != 0:
        raise DriverError(function, code)
