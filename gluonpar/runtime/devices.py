"""Which contexts a request for devices means, and what is there to be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import mxnet as mx

from gluonpar.runtime import driver, wheels

KINDS = ("auto", "gpu", "cpu")
MOST_CPUS = 1024


@dataclass(frozen=True)
class Choice:
    """The contexts chosen, and the one line a user should read about it ("" for none)."""

    ctx: tuple[mx.Context, ...]
    notice: str = ""


def as_list(ctx: mx.Context | Sequence[mx.Context]) -> list[mx.Context]:
    """``ctx`` as Gluon takes it, one context or a list of them, as a list that is not empty.

    Raises TypeError for what is no context, and ValueError for an empty list.
    """
    if not isinstance(ctx, (mx.Context, list, tuple)):
        raise TypeError(f"ctx is {ctx!r}; pass an mx.Context such as mx.cpu(0), or a list of them")
    contexts = [ctx] if isinstance(ctx, mx.Context) else list(ctx)
    if not contexts:
        raise ValueError("ctx is an empty list; pass at least one context, for example mx.cpu(0)")
    for entry in contexts:
        if not isinstance(entry, mx.Context):
            raise TypeError(
                f"ctx holds {entry!r}, which is no mx.Context; pass mx.cpu(i) or mx.gpu(i)"
            )
    return contexts


def gpus_present() -> list[int]:
    """Ids of the GPUs that this MXNet has kernels for; none with a CPU wheel or no driver.

    None, too, where CUDA fails; :func:`why_no_gpu` says with what.
    """
    try:
        count = mx.context.num_gpus()
    except mx.base.MXNetError:
        return []
    if not count:
        return []
    unusable = {gpu.index for gpu in driver.gpus() if not driver.usable(gpu)}
    return [i for i in range(count) if i not in unusable]


def choose(
    num_gpus: int | None = None, gpus: Sequence[int] | None = None, device: str = "auto"
) -> Choice:
    """Contexts for a request: ``num_gpus`` devices, or the GPUs with the ids ``gpus``.

    ``device`` is 'gpu' (GPUs or an error), 'cpu' (CPU contexts, no question asked) or 'auto': GPUs
    if the machine has any, else as many CPU contexts, with a notice that says so. Neither number
    nor ids: all GPUs there are, else one CPU context. Raises ValueError, with what there is, for a
    request that cannot be met; in particular for more GPUs than there are, where there are some.
    """
    if device not in KINDS:
        raise ValueError(f"device={device!r} is none of {', '.join(KINDS)}")
    if num_gpus is not None and num_gpus < 1:
        raise ValueError(f"num_gpus={num_gpus} devices is none at all; ask for 1 or more")
    if gpus is not None:
        return Choice(_by_id(gpus, num_gpus, device))
    if device == "cpu":
        return Choice(_cpus(num_gpus or 1))
    present = gpus_present()
    if not present:
        return _without_gpus(num_gpus or 1, device)
    wanted = len(present) if num_gpus is None else num_gpus
    if wanted > len(present):
        raise ValueError(
            f"num_gpus={wanted}, but MXNet can use {_count(len(present))} here (ids {present}); "
            f"ask for at most {len(present)}, or for {wanted} CPU devices with device='cpu'"
        )
    return Choice(tuple(mx.gpu(i) for i in present[:wanted]))


def _by_id(gpus: Sequence[int], num_gpus: int | None, device: str) -> tuple[mx.Context, ...]:
    ids = list(gpus)
    if device == "cpu":
        raise ValueError(
            f"gpus={ids} names GPUs and device='cpu' refuses them; give one of the two"
        )
    if num_gpus is not None and num_gpus != len(ids):
        raise ValueError(f"num_gpus={num_gpus} and gpus={ids} disagree; give one of the two")
    if not ids:
        raise ValueError("gpus is an empty list; name at least one id, for example gpus=[0]")
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise ValueError(f"gpus={ids} names {twice} more than once; name every GPU once")
    present = gpus_present()
    absent = [i for i in ids if i not in present]
    if absent:
        there = f"the ids here are {present}" if present else f"there is none: {why_no_gpu()}"
        raise ValueError(f"gpus={ids}: no GPU with id {absent} that MXNet can use; {there}")
    return tuple(mx.gpu(i) for i in ids)


def _without_gpus(num_devices: int, device: str) -> Choice:
    reason = why_no_gpu()
    if device == "gpu":
        raise ValueError(f"device='gpu', but MXNet can use no GPU here: {reason}")
    contexts = _cpus(num_devices)
    names = ", ".join(map(str, contexts))
    return Choice(contexts, f"no GPU that MXNet can use, so the devices are {names}: {reason}")


def why_no_gpu() -> str:
    """Why MXNet sees no GPU that it can use, and how to get there."""
    try:
        found = driver.gpus()
    except (driver.DriverMissing, driver.DriverError) as error:
        return str(error)
    usable = [gpu for gpu in found if driver.usable(gpu)]
    if not usable:
        names = "; ".join(map(str, found)) or "the NVIDIA driver shows no GPU"
        oldest, newest = map(driver.version, (driver.OLDEST_CAPABILITY, driver.NEWEST_CAPABILITY))
        return (
            f"{names} (mxnet-cu112 has kernels for {oldest} to {newest} only; "
            "python -m gluonpar doctor says more)"
        )
    return f"{usable[0]} is there, but {_why_mxnet_sees_none()}"


def _why_mxnet_sees_none() -> str:
    installed = " and ".join(wheels.installed()) or "an MXNet"
    if not mx.runtime.Features().is_enabled("CUDA"):
        return (
            f"{installed} {mx.__version__} is installed, without CUDA: pip uninstall -y mxnet, "
            "then pip install 'gluonpar[cu112]'"
        )
    cuda = driver.cuda_version()
    if cuda < driver.OLDEST_CUDA:
        return (
            f"the NVIDIA driver knows CUDA up to {driver.version(cuda)}, and {installed} needs "
            f"{driver.version(driver.OLDEST_CUDA)} or later: install a newer driver"
        )
    try:
        mx.context.num_gpus()
    except mx.base.MXNetError as error:
        last = str(error).strip().splitlines()[-1].strip()
        return f"CUDA does not answer {installed} ({last}): see python -m gluonpar doctor"
    return f"{installed} counts none: see python -m gluonpar doctor"


def _cpus(count: int) -> tuple[mx.Context, ...]:
    if count > MOST_CPUS:
        raise ValueError(
            f"num_gpus={count} CPU devices are too many, for each has a thread of its own; ask for "
            f"at most {MOST_CPUS}"
        )
    return tuple(mx.cpu(i) for i in range(count))


def _count(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"
