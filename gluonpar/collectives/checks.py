"""What a collective takes: a list of arrays that can be combined."""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

import mxnet as mx
import numpy as np

OPS = ("sum", "mean", "max", "min")


class Kind(NamedTuple):
    """What the arrays of a list have in common, asked of MXNet once, and where they are."""

    shape: tuple[int, ...]
    dtype: np.dtype
    ctx: list[mx.Context]

    @property
    def num_bytes(self) -> int:
        """Bytes of one array."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_list(data: Sequence[mx.nd.NDArray], name: str = "data") -> Kind:
    """One dense array a device, all of one shape and dtype."""
    if not isinstance(data, (list, tuple)):
        raise TypeError(f"{name} is a {type(data).__name__}; pass a list of arrays, one a device")
    if not data:
        raise ValueError(f"{name} is an empty list; pass one array a device")
    for i, array in enumerate(data):
        if not isinstance(array, mx.nd.NDArray):
            raise TypeError(f"{name}[{i}] is a {type(array).__name__}, not an MXNet array")
    kinds = [(array.shape, array.dtype, array.stype) for array in data]
    if any(kind != kinds[0] for kind in kinds):
        _raise_different(data, kinds, name)
    shape, dtype, stype = kinds[0]
    if stype != "default":
        raise ValueError(f"{name} holds {stype} arrays; call tostype('default') on each first")
    if len({id(array) for array in data}) < len(data):
        raise ValueError(f"{name} holds the same array more than once; each device needs its own")
    return Kind(shape, np.dtype(dtype), [array.context for array in data])


def _raise_different(data: Sequence[mx.nd.NDArray], kinds: list[tuple], name: str) -> None:
    i = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
    here, first = (
        f"{stype} array of shape {shape} and dtype {np.dtype(dtype)}"
        for shape, dtype, stype in (kinds[i], kinds[0])
    )
    raise ValueError(
        f"{name}[{i}] on {data[i].context} is a {here}, but {name}[0] on {data[0].context} "
        f"a {first}; all must be alike to be combined"
    )


def check_op(op: str, accumulate: str | None, dtype: np.dtype) -> None:
    """A known op, and an accumulator that fits the dtype."""
    if op not in OPS:
        raise ValueError(f"op={op!r} is none of {', '.join(OPS)}")
    if op == "mean" and dtype.kind != "f":
        raise ValueError(f"op='mean' of {dtype} arrays is no {dtype}; use 'sum'")
    if accumulate not in (None, "float32"):
        raise ValueError(f"accumulate={accumulate!r}; it is None or 'float32'")
    if accumulate and dtype != np.float16:
        raise ValueError(f"accumulate={accumulate!r} is for float16 arrays, not {dtype}")


def check_root(root: int, num_devices: int) -> None:
    """A device's number."""
    if not 0 <= root < num_devices:
        raise ValueError(
            f"root={root} is none of the {num_devices} arrays; use 0 to {num_devices - 1}"
        )
