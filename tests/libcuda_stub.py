"""Builds a libcuda.so.1 that reports the GPUs a test asks for; needs gcc."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#include <string.h>
static const char *names[] = {%(names)s};
static const int capabilities[][2] = {%(capabilities)s};
int cuDriverGetVersion(int *version) { *version = %(cuda)d; return 0; }
int cuInit(unsigned flags) { return %(init)d; }
int cuDeviceGetCount(int *count) { *count = %(count)d; return 0; }
int cuDeviceGet(int *device, int index) { *device = 100 + index; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, names[device - 100], size);
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute != 75 && attribute != 76) return 1;
    *value = capabilities[device - 100][attribute - 75];
    return 0;
}
"""


def build_libcuda(folder: Path, gpus, *, init: int = 0, cuda: int = 11020) -> Path:
    """Compile folder/libcuda.so.1; `gpus` lists (name, major, minor), `init` is cuInit's answer."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("there is no gcc to build a stub libcuda.so.1 with")
    source, library = folder / "libcuda.c", folder / "libcuda.so.1"
    source.write_text(
        SOURCE
        % {
            "names": ", ".join(f'"{name}"' for name, _, _ in gpus) or "0",
            "capabilities": ", ".join(f"{{{major}, {minor}}}" for _, major, minor in gpus) or "{0}",
            "count": len(gpus),
            "init": init,
            "cuda": cuda,
        }
    )
    subprocess.run([gcc, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library
