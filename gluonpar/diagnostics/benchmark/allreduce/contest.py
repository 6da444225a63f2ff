"""All candidates on the same arrays, size by size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np

from gluonpar.collectives import checks
from gluonpar.diagnostics.benchmark import measure
from gluonpar.diagnostics.benchmark.allreduce.candidates import Maker, once
from gluonpar.diagnostics.benchmark.allreduce.payload import count_wrong
from gluonpar.runtime import memory

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")


@dataclass(frozen=True)
class Row:
    """One candidate at one size. ``wrong`` counts elements over all devices; None: not checked."""

    name: str
    num_bytes: int
    elements: int
    num_devices: int
    samples: measure.Samples
    wrong: int | None = None

    @property
    def algbw(self) -> float:
        """GB/s (1e9 bytes) of one device's array."""
        return self.num_bytes / self.samples.median / 1e9

    @property
    def busbw(self) -> float:
        """GB/s through one device's wires, if no more than necessary goes there."""
        return self.algbw * 2 * (self.num_devices - 1) / self.num_devices

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with all samples."""
        return {
            "name": self.name,
            "num_bytes": self.num_bytes,
            "elements": self.elements,
            "num_devices": self.num_devices,
            "median_seconds": self.samples.median,
            "quartiles_seconds": list(self.samples.quartiles),
            "algbw": self.algbw,
            "busbw": self.busbw,
            "wrong": self.wrong,
            "seconds": list(self.samples.seconds),
        }


@dataclass(frozen=True)
class Setting:
    """What all candidates are asked for, and how often; ValueError for what cannot be asked."""

    ctx: Sequence[mx.Context]
    dtype: str = "float32"
    op: str = "sum"
    rounds: int = 20
    warmup: int = 5
    check: bool = True

    def __post_init__(self) -> None:
        checks.check_op(self.op, None, np.dtype(self.dtype))
        if self.rounds < 1 or self.warmup < 0:
            raise ValueError(
                f"rounds={self.rounds}, warmup={self.warmup}; need at least 1 round to be measured "
                "and 0 before it"
            )


def sizes(min_bytes: int, max_bytes: int, factor: int, dtype: str) -> list[int]:
    """Numbers of elements: those of ``min_bytes``, times ``factor`` until ``max_bytes``.

    >>> sizes(4096, 1 << 20, 8, "float32")
    [1024, 8192, 65536]
    """
    itemsize = np.dtype(dtype).itemsize
    if min_bytes > max_bytes:
        raise ValueError(f"min_bytes={min_bytes} is more than max_bytes={max_bytes}")
    if factor < 2:
        raise ValueError(f"factor={factor} never gets from min_bytes to max_bytes; give 2 or more")
    if min_bytes < itemsize:
        raise ValueError(f"min_bytes={min_bytes} hold no {dtype}, which takes {itemsize}")
    if max_bytes // itemsize >= 1 << 31:
        raise ValueError(
            f"max_bytes={max_bytes} are {max_bytes // itemsize} elements of {dtype}, but MXNet "
            "counts an array's elements in 32 bits; stay below 2147483648"
        )
    found = []
    while min_bytes <= max_bytes:
        found.append(min_bytes // itemsize)
        min_bytes *= factor
    return found


def split_off_unable(
    found: dict[str, Maker], setting: Setting
) -> tuple[dict[str, Maker], dict[str, str]]:
    """``found``, tried on tiny arrays: those that can do what is asked, and the others' reasons."""
    able, reasons = {}, {}
    for name, maker in found.items():
        candidate = maker(_zeros(setting, 8), setting.op)
        try:
            once(candidate)
        except ValueError as error:
            reasons[name] = str(error)
        else:
            able[name] = maker
    return able, reasons


def measure_size(
    found: dict[str, Maker], setting: Setting, size: int, progress: Callable = iter
) -> list[Row]:
    """A row for each candidate, all working on the same arrays of ``size`` elements.

    ``progress`` as in :func:`measure.interleaved`.
    """
    arrays = _zeros(setting, size)
    candidates = [maker(arrays, setting.op) for maker in found.values()]
    wrong = count_wrong(candidates, arrays, setting.op) if setting.check else {}
    # Zeros stay zeros however often they are summed in place; other numbers would grow to inf.
    for array in arrays:
        array[:] = 0
    samples = measure.interleaved(candidates, setting.rounds, setting.warmup, progress)
    num_bytes = memory.num_bytes(arrays[0])
    return [
        Row(name, num_bytes, size, len(arrays), samples[name], wrong.get(name)) for name in samples
    ]


def _zeros(setting: Setting, size: int) -> list[mx.nd.NDArray]:
    return [mx.nd.zeros((size,), ctx=context, dtype=setting.dtype) for context in setting.ctx]
