"""The numbers that MXNet's operators are given while a function runs, such as rates in an update.

An operator has numbers as parameters (``lr=0.1``), or in an array that is copied from the host. So
from the first use on two functions of MXNet 1.9.1 are replaced: the one that calls operators, and
the one that copies arrays.
"""

from __future__ import annotations

import numbers
import threading
import zlib
from typing import Any, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import register

# Of each operator the names of its parameters, and their values, which may be no numbers.
Calls = List[Tuple[Sequence[str], Sequence[Any]]]

_MOST_ELEMENTS = 256  # of an array that is noted as it is; of a larger one, its checksum is
_call, _copy = register._imperative_invoke, mx.nd.NDArray._sync_copyfrom


class _Thread(threading.local):
    calls: Calls | None = None


_this_thread = _Thread()


class noted:  # noqa: N801 - a context manager, which is faster than a generator
    """Note what this thread's operators are given, in the list that is entered."""

    def __enter__(self) -> Calls:
        if register._imperative_invoke is _call:  # for good: changing a class makes methods slow
            register._imperative_invoke, mx.nd.NDArray._sync_copyfrom = _noted_call, _noted_copy
        self._before, _this_thread.calls = _this_thread.calls, []
        return _this_thread.calls

    def __exit__(self, *error: Any) -> None:
        _this_thread.calls = self._before


def by_array(calls: Calls, num_arrays: int) -> list[dict[str, Any]]:
    """Return, for each array that was updated by these calls, the numbers by the parameter's name.

    Several arrays may be updated by one operator, or by some, in which ``lrs`` has one number per
    array, and ``momentum`` one for all. Several different numbers are a tuple.
    """
    if num_arrays == len(calls) == 1 and {*map(type, calls[0][1])} <= {float, bool}:
        return [dict(zip(*calls[0]))]  # faster
    of_names: dict[str, list] = {}
    for name, value in (pair for names, values in calls for pair in zip(names, values)):
        is_list = isinstance(value, (list, tuple))
        numbers_of = value if is_list else [value]
        # How many arrays are updated together says nothing about an update.
        if numbers_of and all(map(_is_number, numbers_of)) and not name.startswith("num_"):
            key = name.rstrip("s") if is_list else name
            of_names.setdefault(key, []).extend(map(float, numbers_of))
    for name, values in of_names.items():
        if len(values) != num_arrays:
            different = tuple(dict.fromkeys(values))
            of_names[name] = [different if different[1:] else different[0]] * num_arrays
    return [dict(zip(of_names, values)) for values in zip(*of_names.values())]


def _is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Real, np.bool_))


def _noted_call(handle: Any, arrays: Any, names: Any, values: Any, *rest: Any) -> Any:
    if _this_thread.calls is not None:
        _this_thread.calls.append((names, values))
    return _call(handle, arrays, names, values, *rest)


def _noted_copy(array: mx.nd.NDArray, source: Any) -> None:
    if _this_thread.calls is not None:
        values = np.asarray(source)
        few = values.size <= _MOST_ELEMENTS
        value = values.ravel().tolist() if few else zlib.crc32(np.ascontiguousarray(values).data)
        _this_thread.calls.append((["array"], [value]))
    _copy(array, source)
