"""What a collective takes: a list of arrays that can be combined."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx
import numpy as np

OPS = ("sum", "mean", "max", "min")


def check_list(data: Sequence[mx.nd.NDArray], name: str = "data") -> None:
    """One dense array a device, all of one shape and dtype."""
    if not isinstance(data, (list, tuple)):
        raise TypeError(f"{name} is a {type(data).__name__}; pass a list of arrays, one a device")
    if not data:
        raise ValueError(f"{name} is an empty list; pass one array a device")
    kinds = [_kind(array, f"{name}[{i}]") for i, array in enumerate(data)]
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            here, first = (
                f"{s} array of shape {h} and dtype {_show(d)}" for h, d, s in (kind, kinds[0])
            )
            raise ValueError(
                f"{name}[{i}] on {data[i].context} is a {here}, but {name}[0] on {data[0].context} "
                f"a {first}; all must be alike to be combined"
            )
    if kinds[0][2] != "default":
        raise ValueError(
            f"{name} holds {kinds[0][2]} arrays; call tostype('default') on each first"
        )
    if len({id(array) for array in data}) < len(data):
        raise ValueError(f"{name} holds the same array more than once; each device needs its own")


def _kind(array: mx.nd.NDArray, name: str) -> tuple:
    if not isinstance(array, mx.nd.NDArray):
        raise TypeError(f"{name} is a {type(array).__name__}, not an MXNet array")
    return array.shape, array.dtype, array.stype


def check_op(op: str, accumulate: str | None, dtype: type) -> None:
    """A known op, and an accumulator that fits the dtype."""
    if op not in OPS:
        raise ValueError(f"op={op!r} is none of {', '.join(OPS)}")
    if op == "mean" and not np.issubdtype(dtype, np.floating):
        raise ValueError(f"op='mean' of {_show(dtype)} arrays is no {_show(dtype)}; use 'sum'")
    if accumulate not in (None, "float32"):
        raise ValueError(f"accumulate={accumulate!r}; it is None or 'float32'")
    if accumulate and np.dtype(dtype) != np.float16:
        raise ValueError(f"accumulate={accumulate!r} is for float16 arrays, not {_show(dtype)}")


def check_root(root: int, num_devices: int) -> None:
    """A device's number."""
    if not 0 <= root < num_devices:
        raise ValueError(
            f"root={root} is none of the {num_devices} arrays; use 0 to {num_devices - 1}"
        )


def _show(value: object) -> str:
    return getattr(value, "__name__", str(value))
