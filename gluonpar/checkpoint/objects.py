"""Python objects as JSON and arrays: an optimizer and its learning-rate schedule.

None, Booleans, numbers and strings are themselves. A list, tuple, dict, array or object is a dict
with one key, its kind, and is numbered in the order in which it begins; ``{"same": n}`` is number n
once more. Of an object its class's name and its attributes are written, as ``pickle`` would take
them. Reading imports nothing and calls no constructor: the class is that of the object which is at
the same place already, or an optimizer or schedule that the program has defined.
"""

from __future__ import annotations

import logging
import types
from typing import Any, Iterable

import mxnet as mx
import numpy as np
from mxnet import gluon

_PLAIN = (type(None), bool, int, float, str)
_ARRAYS = {"nd": mx.nd.NDArray, "np": mx.np.ndarray, "numpy": np.ndarray}
# Part of the program, not of its state: only the name is written, and must be the same.
_CONSTANTS = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(logging.Logger, np.dtype, np.ufunc, mx.Context),
)
_REBUILT = (mx.optimizer.Optimizer, mx.lr_scheduler.LRScheduler)
# Not written: of the program, and how many parameters MXNet updates in one operator. MXNet reads
# past the end of its arrays if that is too large.
SETTINGS = {"param_dict": {}, "aggregate_num": 0}


class Encoder:
    """Makes JSON of values that may share parts, and collects their ``arrays``."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._numbers: dict[int, int] = {}
        self._numbered: list[Any] = []  # kept, so that no other object has the same id

    def add(self, array: np.ndarray) -> int:
        """Append ``array`` to the arrays; return its number."""
        self.arrays.append(array)
        return len(self.arrays) - 1

    def encode(self, value: Any, place: str, without: Iterable[str] = ()) -> Any:
        """Return ``value`` for JSON; ValueError with its ``place`` if it could not be restored.

        Attributes in ``without`` are left out, if it is an object.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if id(value) in self._numbers:
            return {"same": self._numbers[id(value)]}
        self._numbers[id(value)] = len(self._numbers)
        self._numbered.append(value)
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return {"number": self.add(np.asarray(value))}
        if kind is np.ndarray and not value.dtype.hasobject:
            return {"numpy": self.add(value)}
        if kind in (mx.nd.NDArray, mx.np.ndarray):
            return {"nd" if kind is mx.nd.NDArray else "np": self.add(value.asnumpy())}
        if kind in (list, tuple):
            parts = [self.encode(part, f"{place}[{i}]") for i, part in enumerate(value)]
            return {kind.__name__: parts}
        if kind is dict:
            keys = [self.encode(key, f"a key of {place}") for key in value]
            parts = [self.encode(part, f"{place}[{key!r}]") for key, part in value.items()]
            return {"dict": [None, keys, parts]}
        if isinstance(value, _CONSTANTS) and not getattr(value, "__closure__", None):
            return {"constant": _name(value)}
        if _is_plain_object(value):
            attributes = _state_of(value, place)
            names = attributes.keys() - {*without, *SETTINGS}
            encoded = {k: self.encode(attributes[k], f"{place}.{k}") for k in sorted(names)}
            return {"object": [kind.__name__, encoded]}
        raise _cannot_be_saved(value, place)


class Decoder:
    """Makes values of :class:`Encoder`'s JSON, taking each array out of ``arrays`` once.

    MXNet's arrays are created on ``ctx``. ``index`` has the new index of each parameter, by the one
    at the time of saving, and ``updated`` the saved indices of the parameters that had been
    updated, which tells which dicts have indices as keys. ``moved`` is whether such keys change.
    """

    def __init__(
        self,
        arrays: dict[int, np.ndarray],
        ctx: mx.Context,
        index: dict[int, int],
        updated: Iterable[int],
    ) -> None:
        self.ctx = ctx
        self.moved = any(old != new for old, new in index.items())
        self._arrays, self._index, self._updated = arrays, index, {*updated}
        self._made: list[Any] = []

    def decode(self, value: Any, like: Any, place: str) -> Any:
        """Return the value; ``like`` is the value there now. ValueError if it cannot be made."""
        if type(value) in _PLAIN:
            return value
        [(kind, content)] = value.items()
        if kind == "same":
            return self._made[content]
        if kind in ("list", "tuple"):
            return self._sequence(kind, content, like, place)
        if kind == "dict":
            return self._dict(*content[1:], like, place)
        if kind == "object":
            return self._object(*content, like, place)
        if kind == "constant":
            if not isinstance(like, _CONSTANTS) or _name(like) != content:
                raise ValueError(f"{place} is {content} in the file, but {like!r} here")
            made = like
        elif kind in (*_ARRAYS, "number"):
            made = self._array(kind, self._arrays.pop(content))
        else:
            raise ValueError(f"{place} is a {kind} in the file, which this version does not read")
        self._made.append(made)
        return made

    def _array(self, kind: str, array: np.ndarray) -> Any:
        if kind == "numpy":
            return array
        if kind == "number":
            return array[()]
        with mx.util.np_shape(kind == "np" or mx.util.is_np_shape()):
            create = mx.np.array if kind == "np" else mx.nd.array
            return create(array, dtype=array.dtype, ctx=self.ctx)

    def _sequence(self, kind: str, parts: list, like: Any, place: str) -> Any:
        likes = [*like] if type(like).__name__ == kind else []
        likes += [None] * (len(parts) - len(likes))
        number, made = len(self._made), []
        self._made.append(made)
        for i, (part, old) in enumerate(zip(parts, likes)):
            made.append(self.decode(part, old, f"{place}[{i}]"))
        if self.moved and len(made) == len(self._index):
            if any(isinstance(part, (*_ARRAYS.values(),)) for part in made):
                raise self._ambiguous(place)
        if kind == "tuple":
            self._made[number] = tuple(made)
        return self._made[number]

    def _dict(self, keys: list, parts: list, like: Any, place: str) -> Any:
        made: dict = {}
        self._made.append(made)
        keys = [self.decode(key, None, f"a key of {place}") for key in keys]
        index = self._new_keys(keys, place)
        for key, part in zip(keys, parts):
            new = index.get(key, key)
            old = like.get(new) if isinstance(like, dict) else None
            made[new] = self.decode(part, old, f"{place}[{key!r}]")
        return made

    def _new_keys(self, keys: list, place: str) -> dict[int, int]:
        """Return the new index of each key that is the index of a parameter."""
        if not self.moved or place.endswith("._all_index_update_counts"):  # by device
            return {}
        if place.endswith((".lr_mult", ".wd_mult", ".idx2name")) or {*keys} == self._updated:
            return self._index
        if keys and {*keys} <= self._index.keys():
            raise self._ambiguous(place)
        return {}

    def _ambiguous(self, place: str) -> ValueError:
        return ValueError(
            f"its parameters were in another order, and {place} may or may not be one value per "
            "parameter; give the parameters names that sort in the same order, by a name scope"
        )

    def _object(self, name: str, attributes: dict[str, Any], like: Any, place: str) -> Any:
        same = type(like).__name__ == name and _is_plain_object(like)
        kind = type(like) if same else _defined(name)
        if kind is None:
            raise ValueError(f"{place} is a {name} in the file, but {like!r} here")
        now = vars(like) if same else {}
        moved, self.moved = self.moved, self.moved and not issubclass(kind, _REBUILT[1])
        made = kind.__new__(kind)
        self._made.append(made)
        state = {k: self.decode(v, now.get(k), f"{place}.{k}") for k, v in attributes.items()}
        self.moved = moved
        for key, value in state.items():
            of_class = getattr(kind, key, None)
            hides = callable(of_class) or hasattr(of_class, "__get__")
            if key in SETTINGS or (hides and value is not now.get(key)):
                raise ValueError(f"{kind.__name__} cannot have {key} = {value!r}")
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
        else:
            vars(made).update(state)
        if isinstance(made, mx.optimizer.Optimizer):
            vars(made).update({key: now.get(key, default) for key, default in SETTINGS.items()})
        return made


def _state_of(value: Any, place: str) -> dict[str, Any]:
    """Return the attributes of an object that ``pickle`` would take."""
    try:
        state = value.__reduce_ex__(2)[2]
    except TypeError as error:  # "cannot pickle"
        raise _cannot_be_saved(value, place) from error
    if not isinstance(state, (dict, type(None))):
        raise _cannot_be_saved(value, place)
    return dict(state or {})


def _is_plain_object(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and (kind.__reduce_ex__, kind.__reduce__) == (object.__reduce_ex__, object.__reduce__)
        and not isinstance(value, (*_CONSTANTS, gluon.Block, gluon.Parameter, gluon.Trainer))
        and not issubclass(kind, (int, float, str, list, tuple, set, frozenset, dict))
    )


def _defined(name: str) -> type | None:
    """Return the only optimizer or schedule of this name that the program has defined, if any."""
    classes, namesakes = [*_REBUILT], {}
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        if kind.__name__ == name:
            namesakes[kind.__module__, kind.__qualname__] = kind
    return next(iter(namesakes.values())) if len(namesakes) == 1 else None


def _name(constant: Any) -> str:
    if isinstance(constant, mx.Context):  # not which: that depends on the machine
        return "Context"
    name = getattr(constant, "__qualname__", None) or getattr(constant, "__name__", None)
    return f"{type(constant).__name__} {name or getattr(constant, 'name', constant)}"


def _cannot_be_saved(value: Any, place: str) -> ValueError:
    return ValueError(
        f"{place} is of type {type(value).__qualname__}, which cannot be saved; leave it out in "
        "__getstate__, and make it again in __setstate__"
    )
