"""Peer access: GPUs that copy to each other directly, not through the host's memory.

MXNet enables it only in its kvstore 'device'; without it every ``copyto`` between two GPUs is
staged through the host. CUDA grants it per pair of GPUs and per process.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Sequence

import mxnet as mx

from gluonpar.install import driver

_RUNTIME = "libcudart.so.11.0"  # the one that libmxnet.so has loaded
_ALREADY_ENABLED = 704


def enable(ctx: Sequence[mx.Context]) -> frozenset[tuple[int, int]]:
    """Enable peer access between all GPUs of ``ctx`` that have it; return these pairs of ids.

    Does nothing with ``MXNET_ENABLE_GPU_P2P=0``. A later call with the same GPUs costs nothing.
    """
    return _enable(_gpus(ctx))


def describe(ctx: Sequence[mx.Context]) -> str:
    """Return which GPUs of ``ctx`` copy directly to each other; "" for fewer than two GPUs."""
    return staged(ctx) or ("peer access between all" if len(_gpus(ctx)) > 1 else "")


def staged(ctx: Sequence[mx.Context]) -> str:
    """Return which copies between GPUs of ``ctx`` go through the host, and why; "" if none does."""
    copies = driver.staged(_gpus(ctx), enable(ctx))
    return "no peer access: MXNET_ENABLE_GPU_P2P=0" if copies and _is_off() else copies


def _gpus(ctx: Sequence[mx.Context]) -> frozenset[int]:
    return frozenset(c.device_id for c in ctx if c.device_type == "gpu")


def _is_off() -> bool:
    return os.environ.get("MXNET_ENABLE_GPU_P2P") == "0"


@functools.lru_cache(None)
def _enable(gpus: frozenset[int]) -> frozenset[tuple[int, int]]:
    if len(gpus) < 2 or _is_off():
        return frozenset()
    cuda, current, enabled = ctypes.CDLL(_RUNTIME), ctypes.c_int(), set()
    cuda.cudaGetDevice(ctypes.byref(current))
    try:
        for i, j in driver.peers(gpus):
            cuda.cudaSetDevice(i)
            if cuda.cudaDeviceEnablePeerAccess(j, 0) in (0, _ALREADY_ENABLED):
                enabled.add((i, j))
            cuda.cudaGetLastError()  # MXNet would take the error that stays for one of its own
    finally:
        cuda.cudaSetDevice(current)
    return frozenset(enabled)
