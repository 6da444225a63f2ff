"""The GPUs of this machine, as the NVIDIA driver reports them.

This module is used before MXNet is installed, so it imports only the standard library. It calls the
driver through libcuda.so.1, which applies CUDA_VISIBLE_DEVICES: it lists the GPUs that MXNet will
see. `nvidia-smi` ignores that variable and may not be installed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
from typing import Any, Collection, Iterable

LIBRARY = "libcuda.so.1"


def version(pair: tuple[int, int]) -> str:
    """Return two numbers as a version, such as '11.2'."""
    return f"{pair[0]}.{pair[1]}"


# The wheel mxnet-cu112 1.9.1 contains machine code for sm_50, 60, 70, 80 and 86, and no PTX that a
# driver could translate for anything else. Machine code runs on its own and on later minor
# versions of the same major version: 8.9 runs the code for 8.6, and 9.0 has nothing to run.
OLDEST_CAPABILITY, NEWEST_CAPABILITY = (5, 0), (8, 9)
KERNELS = "mxnet-cu112 has kernels for compute capability 5.0 to 8.9"

# The driver must support CUDA 11, any 11.x: minor versions are compatible within a major one.
OLDEST_CUDA = (11, 0)

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class DriverError(RuntimeError):
    """There is no driver, or one of its functions failed with a CUresult, such as 803."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU: its index for ``mx.gpu(index)``, its name and its compute capability, e.g. (7, 5)."""

    index: int
    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"gpu {self.index} {self.name}, compute capability {version(self.capability)}"


def usable(gpu: Gpu) -> bool:
    """Return whether mxnet-cu112 1.9.1 has kernels for this GPU."""
    return OLDEST_CAPABILITY <= gpu.capability <= NEWEST_CAPABILITY


def cuda_version() -> tuple[int, int]:
    """Return the newest CUDA version that the driver supports, e.g. (12, 4); raise as gpus()."""
    number = _get("cuDriverGetVersion")
    return number // 1000, number % 1000 // 10


def gpus() -> list[Gpu]:
    """Return the GPUs that programs may use, in CUDA's order.

    The list is empty if the machine has a driver but no GPU, or if CUDA_VISIBLE_DEVICES hides them.
    This starts CUDA in the process (cuInit), so a process forked from it later cannot use a GPU.
    Raises DriverError if a function of the driver fails, or if there is no driver.
    """
    if _call("cuInit", 0, also=_NO_DEVICE) == _NO_DEVICE:
        return []
    shown, name = [], ctypes.create_string_buffer(256)
    for index in range(_get("cuDeviceGetCount")):
        device = _get("cuDeviceGet", index)
        _call("cuDeviceGetName", name, len(name), device)
        major, minor = (_get("cuDeviceGetAttribute", kind, device) for kind in _CAPABILITY)
        shown.append(Gpu(index, name.value.decode(errors="replace"), (major, minor)))
    return shown


def peers(indices: Iterable[int]) -> set[tuple[int, int]]:
    """Return the pairs (i, j) of these GPUs where i may write to j's memory, or raise DriverError.

    GPUs with peer access in both directions copy directly to each other, others through the host.
    """
    _call("cuInit", 0)
    devices = {index: _get("cuDeviceGet", index) for index in indices}
    pairs = itertools.permutations(devices, 2)
    return {(i, j) for i, j in pairs if _get("cuDeviceCanAccessPeer", devices[i], devices[j])}


def staged(indices: Iterable[int], direct: Collection[tuple[int, int]]) -> str:
    """Return a line that names the pairs that are not in ``direct`` both ways; "" if all are."""
    pairs = itertools.combinations(sorted(indices), 2)
    names = [f"{i}-{j}" for i, j in pairs if not {(i, j), (j, i)} <= set(direct)]
    return f"no peer access: copies of GPUs {', '.join(names)} go through the host" if names else ""


def why_unusable() -> str:
    """Return one line that says why mxnet-cu112 cannot use any GPU here; "" if it can."""
    try:
        shown, cuda = gpus(), cuda_version()
    except DriverError as error:
        return str(error)
    if not shown:
        return f"the NVIDIA driver shows no GPU{hidden()}"
    if not any(map(usable, shown)):
        return f"{'; '.join(map(str, shown))} ({KERNELS} only)"
    if cuda < OLDEST_CUDA:
        needed = f"mxnet-cu112 needs {version(OLDEST_CUDA)} or later: install a newer driver"
        return f"the NVIDIA driver supports CUDA up to {version(cuda)}, and {needed}"
    return ""


def hidden() -> str:
    """Return " (CUDA_VISIBLE_DEVICES is '...')" if that variable may hide GPUs, else ""."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if devices is None else f" (CUDA_VISIBLE_DEVICES is {devices!r})"


def _get(function: str, *arguments: int) -> int:
    number = ctypes.c_int()
    _call(function, ctypes.byref(number), *arguments)
    return number.value


def _call(function: str, *arguments: Any, also: int = 0) -> int:
    """Call a function of the driver and return 0 or ``also``. DriverError for other results."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        absent = str(error).startswith(LIBRARY) and "No such file" in str(error)
        raise DriverError(
            f"no NVIDIA driver found ({LIBRARY if absent else error}). CPU devices need none; for "
            "a GPU, install its driver, or start the container with docker run --gpus all"
        ) from error
    code = getattr(library, function)(*arguments)
    if code not in (0, also):
        raise DriverError(
            f"the NVIDIA driver's {function} failed with error {code}; nvidia-smi and gluonpar's "
            "docs/troubleshooting.md may say more"
        )
    return code
