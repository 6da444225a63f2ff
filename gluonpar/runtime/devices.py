"""Chooses and checks contexts, says why a GPU cannot be used, and sets up GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import Iterator, NamedTuple, Sequence

import mxnet as mx

from gluonpar.install import driver, wheels
from gluonpar.options import DEVICES
from gluonpar.runtime import memory

MAX_CPU_DEVICES = 1024  # MXNet starts a thread for each
DETERMINISTIC = {"MXNET_ENFORCE_DETERMINISM": "1", "MXNET_CUDNN_AUTOTUNE_DEFAULT": "0"}
_ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled


class DeviceChoice(NamedTuple):
    """The chosen contexts, and a notice of one line to show to the user, or ""."""

    ctx: tuple[mx.Context, ...]
    notice: str = ""


def as_list(ctx: mx.Context | Sequence[mx.Context]) -> list[mx.Context]:
    """Return a non-empty list of contexts; ``ctx`` is one context or a list, as in Gluon.

    Raises TypeError if an entry is not a context, and ValueError for an empty list.
    """
    contexts = list(ctx) if isinstance(ctx, (list, tuple)) else [ctx]
    if not contexts:
        raise ValueError("ctx must contain at least one context, got []; try [mx.cpu(0)]")
    for entry in contexts:
        if not isinstance(entry, mx.Context):
            raise TypeError(
                f"ctx must be an mx.Context, such as mx.cpu(0), or a list; got {entry!r}"
            )
    return contexts


def check_distinct(ctx: Sequence[mx.Context]) -> None:
    """Raise ValueError if ``ctx`` repeats a context: Gluon would train one of its two copies."""
    twice = [context for i, context in enumerate(ctx) if context in ctx[:i]]
    if twice:
        raise ValueError(
            f"a Block must be on different contexts, got {twice[0]} more than once in {list(ctx)}; "
            f"CPU contexts stand in for GPUs as {[*map(mx.cpu, range(len(ctx)))]}"
        )


def gpus_present() -> list[int]:
    """Return the ids of the GPUs that MXNet can use. :func:`why_no_gpu` says why there are none."""
    count = 0
    with contextlib.suppress(mx.base.MXNetError):
        count = mx.context.num_gpus()
    shown = driver.gpus() if count else []  # without a GPU the driver may be missing
    return [gpu.index for gpu in shown if gpu.index < count and driver.usable(gpu)]


def choose(
    num_gpus: int | None = None, gpus: Sequence[int] | None = None, device: str = "auto"
) -> DeviceChoice:
    """Return contexts for ``num_gpus`` devices, or for the GPUs with the ids ``gpus``.

    ``device='gpu'`` requires GPUs, and ``device='cpu'`` gives CPU contexts. ``'auto'`` gives GPUs
    if MXNet can use any here, otherwise as many CPU contexts, with a notice. Without ``num_gpus``
    and ``gpus`` it gives all GPUs, or one CPU context. Raises ValueError if the request cannot be
    met, for example if there are too few GPUs.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    if num_gpus is not None and num_gpus < 1:
        raise ValueError(f"num_gpus must be at least 1, got {num_gpus}")
    if gpus is not None:
        for name, value in {"num_gpus": num_gpus, "device": device}.items():
            if value not in (None, "auto", "gpu"):
                both = f"gpus={list(gpus)} and {name}={value!r}"
                raise ValueError(f"{both} exclude each other; give one of the two")
        return DeviceChoice(_by_id(list(gpus)))
    present = [] if device == "cpu" else gpus_present()
    if not present and device == "gpu":
        raise ValueError(f"device='gpu', but there is no GPU that MXNet can use: {why_no_gpu()}")
    if not present:
        if num_gpus is not None and num_gpus > MAX_CPU_DEVICES:
            most = f"num_gpus must be at most {MAX_CPU_DEVICES} with CPU devices"
            raise ValueError(f"{most}, got {num_gpus}; each of them has a thread of its own")
        cpus = tuple(mx.cpu(i) for i in range(num_gpus or 1))
        if device == "cpu":
            return DeviceChoice(cpus)
        instead = "a CPU device" if len(cpus) == 1 else f"{len(cpus)} CPU devices"
        notice = f"No GPU that MXNet can use; using {instead} (details: gluonpar doctor)"
        return DeviceChoice(cpus, notice)
    wanted = num_gpus or len(present)
    if wanted > len(present):
        number = "1 GPU" if len(present) == 1 else f"{len(present)} GPUs"
        raise ValueError(
            f"num_gpus={wanted}, but MXNet can use {number} here (ids {present}); use at most "
            f"{len(present)}, or {wanted} CPU devices with device='cpu'"
        )
    return DeviceChoice(tuple(mx.gpu(i) for i in present[:wanted]))


def _by_id(ids: list[int]) -> tuple[mx.Context, ...]:
    if not ids or len(set(ids)) < len(ids):
        raise ValueError(f"gpus must contain at least one id, and none twice, got {ids}")
    present = gpus_present()
    absent = [i for i in ids if i not in present]
    if absent:
        available = f"available ids: {present}" if present else why_no_gpu()
        raise ValueError(f"gpus={ids}: no GPU with id {absent} that MXNet can use; {available}")
    return tuple(mx.gpu(i) for i in ids)


def why_no_gpu() -> str:
    """Return one line that says why MXNet can use no GPU here, and what to do about it."""
    reason = driver.why_unusable()
    if reason:
        return reason
    fault = "finds none: see gluonpar doctor"
    if not mx.runtime.Features().is_enabled("CUDA"):
        fault = f"was built without CUDA: pip uninstall -y mxnet, then {wheels.CUDA}"
    return f"{next(filter(driver.usable, driver.gpus()))} is present, but MXNet {fault}"


def enable_peers(ctx: Sequence[mx.Context]) -> frozenset[tuple[int, int]]:
    """Enable direct copies between GPUs of ``ctx``; return the pairs of ids where this is possible.

    MXNet enables peer access only in its kvstore 'device'; without it every ``copyto`` between two
    GPUs goes through the host's memory. Does nothing with ``MXNET_ENABLE_GPU_P2P=0``.
    """
    return _enable_peers(_gpus(ctx))


def staged(ctx: Sequence[mx.Context]) -> str:
    """Return a line naming GPUs of ``ctx`` whose copies go through the host; "" if none do."""
    return driver.staged(_gpus(ctx), enable_peers(ctx))


def _gpus(ctx: Sequence[mx.Context]) -> frozenset[int]:
    return frozenset(c.device_id for c in ctx if c.device_type == "gpu")


@functools.lru_cache(None)
def _enable_peers(gpus: frozenset[int]) -> frozenset[tuple[int, int]]:
    if len(gpus) < 2 or os.environ.get("MXNET_ENABLE_GPU_P2P") == "0":
        return frozenset()
    cuda, current, enabled = ctypes.CDLL(memory.CUDA_RUNTIME), ctypes.c_int(), set()
    cuda.cudaGetDevice(ctypes.byref(current))
    for i, j in driver.peers(gpus):
        cuda.cudaSetDevice(i)
        if cuda.cudaDeviceEnablePeerAccess(j, 0) in (0, _ALREADY_ENABLED):
            enabled.add((i, j))
        cuda.cudaGetLastError()  # clears the error, which MXNet would take for its own
    cuda.cudaSetDevice(current)
    return frozenset(enabled)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Let MXNet use only deterministic algorithms inside: GPUs give the same bits each time.

    By default MXNet takes the fastest algorithm for each shape of a convolution; some algorithms of
    cuDNN, max pooling's backward included, add in another order each time. MXNet keeps its choice
    for a shape until the process ends, so this does not affect earlier shapes. Waits at the start.
    """
    mx.nd.waitall()  # setenv may move the environment while an operator reads it
    before = {name: os.environ.pop(name, None) for name in DETERMINISTIC}
    os.environ.update(DETERMINISTIC)
    try:
        yield
    finally:
        for name in DETERMINISTIC:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
