"""Plain values as JSON and arrays, such as the attributes and states of an optimizer.

None, Booleans, numbers and strings are themselves. A list, tuple, dict or array is a dict with one
key, its kind: ``{"tuple": [1, 2]}``, or ``{"nd": 0}`` for an ``mx.nd`` array, which is number 0 of
the arrays. Reading makes such values only: it imports nothing and calls nothing that a file names.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

_SCALARS = (type(None), bool, int, float, str)


class NotPlainError(ValueError):
    """A value is of another kind, or in two places, which must stay one object."""


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


class Decoder:
    """Makes values of :class:`Encoder`'s JSON, taking each array out of ``arrays`` once.

    MXNet's arrays are created on ``ctx``.
    """

    def __init__(self, arrays: dict[int, np.ndarray], ctx: mx.Context) -> None:
        self.arrays, self.ctx = arrays, ctx
        self._made: list[Any] = []

    def decode(self, value: Any) -> Any:
        """Return the value that ``value`` of the JSON stands for."""
        if type(value) in _SCALARS:
            return value
        [(kind, content)] = value.items()
        if kind == "same":  # of former versions: the value that began as number ``content``
            return self._made[content]
        number = len(self._made)
        self._made.append(None)
        self._made[number] = made = self._make(kind, content)
        return made

    def _make(self, kind: str, content: Any) -> Any:
        if kind in ("list", "tuple"):
            parts = [self.decode(part) for part in content]
            return tuple(parts) if kind == "tuple" else parts
        if kind == "dict":
            _, keys, parts = content
            return dict(zip([self.decode(key) for key in keys], [self.decode(p) for p in parts]))
        if kind not in ("numpy", "number", "nd", "np"):
            raise ValueError(f"{kind!r} is no kind of plain value")
        array = self.arrays.pop(content)
        if kind in ("numpy", "number"):
            return array if kind == "numpy" else array[()]
        with mx.util.np_shape(kind == "np" or mx.util.is_np_shape()):
            create = mx.np.array if kind == "np" else mx.nd.array
            return create(array, dtype=array.dtype, ctx=self.ctx)
