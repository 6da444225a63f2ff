"""Files of a JSON header, arrays and plain values: NumPy's ``.npz``, read without pickles.

The members are ``header.npy`` (the bytes of the JSON text), ``0.npy``, ``1.npy``, ... The CRC-32 of
every member, which a zip file has, is verified before anything is used.

Plain values are None, Booleans, numbers, strings, arrays, and lists, tuples and dicts of these,
such as the attributes and states of an optimizer. In the header the first four are themselves; the
others are a dict with one key, the kind: ``{"tuple": [1, 2]}``, or ``{"nd": 0}`` for an ``mx.nd``
array, which is number 0 of the arrays. Reading imports nothing and calls nothing that a file names.
"""

from __future__ import annotations

import io
import json
import os
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np

from gluonpar.checkpoint import files

_SCALARS = (type(None), bool, int, float, str)


def write(path: str | os.PathLike, header: Any, arrays: Sequence[np.ndarray]) -> None:
    """Write a file whole or not at all; OSError if the file system refuses.

    ``header`` is for JSON and may hold NumPy's numbers; ``arrays`` are of any dtype but object.
    """
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(header, default=np.number.item).encode(), "uint8")
    by_number: dict[str, Any] = {str(i): array for i, array in enumerate(arrays)}
    np.savez(buffer, header=text, **by_number)
    with files.atomic_write(path) as file:
        file.write(buffer.getbuffer())


def parsed(
    content: bytes, parse: Callable[[Any, dict[int, np.ndarray]], Any], path: str | os.PathLike
) -> Any:
    """Return ``parse(header, arrays by number)`` of a file's content.

    ``parse`` may remove arrays from its argument, so that their memory is free again earlier.
    Raises ValueError, with ``path`` and the reason, if the content is not such a file or is
    damaged, or if ``parse`` raises any exception, as it may on a file made by hand.
    """
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:  # noqa: TID251
            damaged = file.zip.testzip()
            if damaged is not None:
                raise ValueError(f"it is damaged: {damaged} does not have its CRC-32")
            arrays = {i: file[str(i)] for i in range(len(file.files) - 1)}
            header = json.loads(file["header"].tobytes())
        return parse(header, arrays)
    except Exception as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} cannot be loaded: {reason}") from error


class NotPlainError(ValueError):
    """A value is not plain, or is in two places and must stay one object."""


class Encoder:
    """Makes JSON of plain values, and collects their ``arrays``."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._seen: dict[int, Any] = {}  # keeps the values, so that no other has the same id

    def add(self, array: np.ndarray) -> int:
        """Append ``array`` to the arrays; return its number."""
        self.arrays.append(array)
        return len(self.arrays) - 1

    def encode(self, value: Any, place: str) -> Any:
        """Return ``value`` for JSON; NotPlainError, with its ``place``, if it is not plain."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return {"number": self.add(np.asarray(value))}
        if kind is tuple:
            return {"tuple": [self.encode(part, f"{place}[{i}]") for i, part in enumerate(value)]}
        if id(value) in self._seen:
            raise NotPlainError(f"{place} is in a second place, too")
        self._seen[id(value)] = value
        if kind is np.ndarray and not value.dtype.hasobject:
            return {"numpy": self.add(value)}
        if kind in (mx.nd.NDArray, mx.np.ndarray):
            return {"nd" if kind is mx.nd.NDArray else "np": self.add(value.asnumpy())}
        if kind is list:
            return {"list": [self.encode(part, f"{place}[{i}]") for i, part in enumerate(value)]}
        if kind is dict:
            keys = [self.encode(key, f"a key of {place}") for key in value]
            parts = [self.encode(part, f"{place}[{key!r}]") for key, part in value.items()]
            return {"dict": [None, keys, parts]}
        raise NotPlainError(f"{place} is of type {kind.__qualname__}")


def decode(value: Any, arrays: dict[int, np.ndarray], ctx: mx.Context) -> Any:
    """Return what :meth:`Encoder.encode` encoded, with MXNet's arrays on ``ctx``.

    Removes its arrays from ``arrays``.
    """
    if type(value) in _SCALARS:
        return value
    [(kind, content)] = value.items()
    if kind in ("list", "tuple"):
        parts = [decode(part, arrays, ctx) for part in content]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "dict":
        _, keys, parts = content
        return {decode(k, arrays, ctx): decode(v, arrays, ctx) for k, v in zip(keys, parts)}
    array = arrays.pop(content)
    if kind == "numpy":
        return array
    if kind == "number":
        return array[()]
    create = {"nd": mx.nd.array, "np": mx.np.array}[kind]
    with mx.util.np_shape(kind == "np" or mx.util.is_np_shape()):
        return create(array, dtype=array.dtype, ctx=ctx)
