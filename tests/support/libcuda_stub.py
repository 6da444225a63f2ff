"""Build a libcuda.so.1 that reports given GPUs and computes nothing; needs gcc.

It has the functions that gluonpar calls, and the names that mxnet-cu112's libmxnet.so must find in
order to be loaded; those return CUDA_ERROR_NOT_SUPPORTED.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#include <string.h>
static const char *names[] = {%(names)s};
static const int capabilities[][2] = {%(capabilities)s};
static const int peers[][2] = {%(peers)s};
int cuDriverGetVersion(int *version) { *version = %(cuda)d; return 0; }
int cuInit(unsigned flags) { return %(cuInit)d; }
int cuDeviceGetCount(int *count) { *count = %(count)d; return %(cuDeviceGetCount)d; }
int cuDeviceGet(int *device, int index) { *device = 100 + index; return %(cuDeviceGet)d; }
int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, names[device - 100], size);
    return %(cuDeviceGetName)d;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute != 75 && attribute != 76) return 1;
    *value = capabilities[device - 100][attribute - 75];
    return %(cuDeviceGetAttribute)d;
}
int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0;
    for (int i = 0; i < sizeof(peers) / sizeof(peers[0]); i++)
        if (peers[i][0] == device - 100 && peers[i][1] == peer - 100) *can = 1;
    return 0;
}
#define ABSENT(name) int name(void) { return 801; }
ABSENT(cuDevicePrimaryCtxRetain)
ABSENT(cuGetErrorString)
ABSENT(cuGraphKernelNodeGetParams)
ABSENT(cuGraphNodeGetType)
ABSENT(cuLaunchKernel)
ABSENT(cuModuleGetFunction)
ABSENT(cuModuleLoadData)
ABSENT(cuModuleLoadDataEx)
ABSENT(cuModuleUnload)
"""


FUNCTIONS = ("cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute")


def build_libcuda(
    folder: Path, gpus, *, cuda: int = 11020, peers=None, name: str = "libcuda.so.1", **codes: int
) -> Path:
    """Compile folder/``name``; ``gpus`` lists (name, major, minor).

    ``peers`` are pairs of indices (all of them), and ``codes`` what functions return (0) by name.
    """
    peers = itertools.permutations(range(len(gpus)), 2) if peers is None else peers
    source = SOURCE % {
        "names": ", ".join(f'"{name}"' for name, _, _ in gpus) or "0",
        "capabilities": ", ".join(f"{{{major}, {minor}}}" for _, major, minor in gpus) or "{0}",
        "peers": ", ".join(f"{{{one}, {other}}}" for one, other in peers) or "{-1}",
        "count": len(gpus),
        "cuda": cuda,
        **dict.fromkeys(FUNCTIONS, 0),
        **codes,
    }
    return build_library(folder, name, source)


def build_library(folder: Path, name: str, source: str = "int nothing;") -> Path:
    """Compile a shared library from C source; its soname is its name."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("building a shared library needs gcc")
    code, library = folder / f"{name}.c", folder / name
    code.write_text(source)
    command = [gcc, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(library), str(code)]
    subprocess.run(command, check=True)
    code.unlink()
    return library
