"""Files with a JSON header, arrays and plain values: NumPy's ``.npz``, read without pickles.

The members are ``header.npy`` (the bytes of the JSON text), ``0.npy``, ``1.npy``, ... Reading first
verifies the CRC-32 that a zip file has of every member.

Plain values are None, Booleans, numbers, strings, arrays, and lists, tuples and dicts of these,
such as the attributes and states of an optimizer. In the header the first four are themselves; the
others are a dict with one key, the kind: ``{"tuple": [1, 2]}``, or ``{"nd": 0}`` for an ``mx.nd``
array, which is number 0 of the arrays. Reading imports nothing and calls nothing that a file names.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import struct
import zipfile
from typing import Any

import mxnet as mx
import numpy as np

from gluonpar.checkpoint import files

_SCALARS = (type(None), bool, int, float, str)
_ARRAYS = {np.ndarray: "numpy", mx.nd.NDArray: "nd", mx.np.ndarray: "np"}


def write(path: str | os.PathLike, header: Any) -> None:
    """Write a file, whole or not at all. Raises OSError if the file system refuses.

    ``header`` is what JSON takes, and NumPy's numbers and arrays, of any dtype but object. The
    file's header has the number of an array in its place.
    """
    arrays: dict[str, Any] = {}

    def number(value: Any) -> int | float:
        if not isinstance(value, np.ndarray):
            return np.number.item(value)
        arrays[str(len(arrays))] = value
        return len(arrays) - 1

    text = np.frombuffer(json.dumps(header, default=number).encode(), "uint8")
    buffer = io.BytesIO()
    np.savez(buffer, header=text, **arrays)
    with files.atomic_write(path) as file:
        file.write(buffer.getbuffer())


def read(content: bytes) -> tuple[Any, dict[int, np.ndarray]]:
    """Return header and arrays, by number, of a file's content. The arrays are views of it.

    Raises any exception if the content is damaged.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        if (damaged := file.testzip()) is not None:
            raise ValueError(f"it is damaged: {damaged} does not have its CRC-32")
        members = {
            info.filename[: -len(".npy")]: _view(content, file, info) for info in file.infolist()
        }
    header = json.loads(members.pop("header").tobytes())
    return header, {i: members[str(i)] for i in range(len(members))}


def _view(content: bytes, file: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Return an array of the file as a view of ``content``; NumPy's own reader would copy it."""
    with file.open(info) as member:
        version = np.lib.format.read_magic(member)
        read_header = getattr(np.lib.format, f"read_array_header_{version[0]}_{version[1]}")
        shape, is_fortran, dtype = read_header(member)
        if dtype.hasobject or info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{info.filename} is compressed, or has objects")
        # The member's own header has 30 bytes, and at its end the sizes of two more fields.
        sizes = struct.unpack_from("<HH", content, info.header_offset + 26)
        start = info.header_offset + 30 + sum(sizes) + member.tell()
    flat = np.frombuffer(content, dtype, math.prod(shape), start)
    return flat.reshape(shape, order="F" if is_fortran else "C")


class NotPlainError(ValueError):
    """A value is not plain, or is in two places and must stay one object."""


def encode(value: Any, place: str, seen: set[int]) -> Any:
    """Return ``value`` in a form that :func:`write` takes.

    Raises NotPlainError, which names ``place``, if it is not plain, or if one of its parts is in
    ``seen``, the ids of the parts of other values; adds the ids of its own parts.
    """
    if (kind := type(value)) in _SCALARS:
        return value
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {"number": np.asarray(value)}
    if kind is not tuple and id(value) in seen:
        raise NotPlainError(f"{place} is in a second place")
    seen.add(id(value))
    if kind in _ARRAYS:
        array = value if kind is np.ndarray else value.asnumpy()
        if not array.dtype.hasobject:
            return {_ARRAYS[kind]: array}
    if kind in (list, tuple):
        parts = [encode(part, f"{place}[{i}]", seen) for i, part in enumerate(value)]
        return {kind.__name__: parts}
    if kind is dict:
        keys = [encode(key, f"a key of {place}", seen) for key in value]
        parts = [encode(part, f"{place}[{key!r}]", seen) for key, part in value.items()]
        return {"dict": [None, keys, parts]}
    raise NotPlainError(f"{place} is of type {kind.__qualname__}")


def decode(value: Any, arrays: dict[int, np.ndarray], ctx: mx.Context) -> Any:
    """Return what :func:`encode` was given, with MXNet's arrays on ``ctx``.

    Removes the arrays that it uses from ``arrays``.
    """
    if type(value) in _SCALARS:
        return value
    [(kind, content)] = value.items()
    inner = functools.partial(decode, arrays=arrays, ctx=ctx)
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(inner, content))
    if kind == "dict":
        _, keys, parts = content
        return dict(zip(map(inner, keys), map(inner, parts)))
    array = arrays.pop(content)
    if kind in ("numpy", "number"):
        return array.copy() if kind == "numpy" else array[()]
    create = {"nd": mx.nd.array, "np": mx.np.array}[kind]
    with mx.util.np_shape(kind == "np" or mx.util.is_np_shape()):
        return create(array, dtype=array.dtype, ctx=ctx)
