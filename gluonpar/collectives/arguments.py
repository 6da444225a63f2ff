"""Checks of a collective's arguments: a list of arrays, an op."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import mxnet as mx
import numpy as np

from gluonpar.collectives.exchange import Exchange
from gluonpar.runtime import memory

OPS = ("sum", "mean", "max", "min")
DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")


class Kind(NamedTuple):
    """The shape and dtype that the arrays of a list share, and the context of each."""

    shape: tuple[int, ...]
    dtype: np.dtype
    ctx: list[mx.Context]
    stype: str = "default"


def check_list(data: Sequence[mx.nd.NDArray], name: str = "data", row_sparse: bool = False) -> Kind:
    """Return the kind of ``data``, which must be distinct arrays of one shape and dtype.

    They must be dense, or with ``row_sparse`` all dense or all row_sparse.
    """
    if not isinstance(data, (list, tuple)):
        kind = type(data).__name__
        raise TypeError(f"{name} must be a list of arrays, one per device, got {kind}")
    if not data:
        raise ValueError(f"{name} must hold at least one array, got an empty list")
    kinds = []
    for i, array in enumerate(data):
        if not isinstance(array, mx.nd.NDArray):
            raise TypeError(f"{name}[{i}] must be an MXNet array, got {type(array).__name__}")
        kinds.append(memory.kind(array))
        if kinds[i] != kinds[0]:
            got = f"{name}[{i}] {_described(array)}, but {name}[0] {_described(data[0])}"
            raise ValueError(f"{name} must have one shape, dtype and storage type, got {got}")
    shape, dtype, stype = kinds[0]
    if stype != "default" and not (row_sparse and stype == "row_sparse"):
        raise ValueError(
            f"{name} must hold dense arrays, got {stype} storage; call tostype('default') on each"
        )
    check_apart(data, name)
    return Kind(shape, dtype, [*map(memory.context, data)], stype)


def check_exchange(kinds: Sequence[Kind], exchange: Exchange) -> None:
    """Raise ValueError unless lists of these kinds can be exchanged together by ``exchange``."""
    for j, kind in enumerate(kinds):
        if kind.ctx != kinds[0].ctx:
            raise ValueError(
                f"lists must be on the same contexts, got lists[{j}] on {kind.ctx}, "
                f"but lists[0] on {kinds[0].ctx}"
            )
        if exchange.op is not None:
            check_op(exchange.op, kind.dtype)
        if kind.stype == "row_sparse" and (exchange.algorithm or exchange.op in ("max", "min")):
            raise ValueError(
                "row_sparse arrays must be given op 'sum' or 'mean' and no algorithm, got "
                f"op={exchange.op!r} and algorithm={exchange.algorithm!r}; or call "
                "tostype('default') on each"
            )


def check_lengths(**lists: Sequence | None) -> None:
    """Raise ValueError unless lists that belong together are of one length; None is none."""
    lengths = {name: len(entries) for name, entries in lists.items() if entries is not None}
    if len({*lengths.values()}) > 1:
        got = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise ValueError(f"lists that belong together must be of one length, got {got}")


def check_apart(arrays: Sequence[mx.nd.NDArray], name: str) -> None:
    """Raise ValueError if two of ``arrays`` are the same, or share memory."""
    if len({*map(memory.chunk, arrays)}) == len(arrays):
        return
    extents = sorted(map(memory.extent, arrays))
    for (chunk, _, end), (next_chunk, next_begin, _) in zip(extents, extents[1:]):
        if chunk == next_chunk and next_begin < end:
            raise ValueError(
                f"{name} must hold different arrays, got the same one, or one and its view, more "
                "than once"
            )


def _described(array: mx.nd.NDArray) -> str:
    kind = f"shape {array.shape}, dtype {np.dtype(array.dtype)} and {array.stype} storage"
    return f"on {array.context} with {kind}"


def check_op(op: str, dtype: np.dtype) -> None:
    """Raise ValueError unless ``op`` is known, and arrays of ``dtype`` can be combined by it."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if dtype not in DTYPES:
        got = (dtype.names or [dtype.name])[0]  # bfloat16 is a structure to NumPy
        raise ValueError(
            f"arrays must be of one of {', '.join(DTYPES)}, got {got}; convert them with astype"
        )
    if op == "mean" and dtype.kind != "f":
        raise ValueError(f"op='mean' must be given float arrays, got {dtype}; use 'sum'")
