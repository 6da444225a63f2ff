"""The numbers that MXNet's operators are given while a function runs, such as rates in an update.

An operator has numbers as parameters (``lr=0.1``), or in an array that is copied from the host. So
two functions of MXNet 1.9.1 are replaced from the first use on: the one that calls operators, and
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

# The names of each operator's parameters, and their values, some of which are no numbers.
Calls = List[Tuple[Sequence[str], Sequence[Any]]]

_MOST_ELEMENTS = 256  # of an array whose numbers are noted; a larger array's checksum is noted
_call, _copy = register._imperative_invoke, mx.nd.NDArray._sync_copyfrom


class _Thread(threading.local):
    calls: Calls | None = None


_this_thread = _Thread()


class noted:  # noqa: N801 - a context manager, which is faster than a generator
    """Yield a list, in which is noted what this thread's operators are given inside."""

    def __enter__(self) -> Calls:
        if register._imperative_invoke is _call:  # kept: changing a class makes its methods slow
            register._imperative_invoke, mx.nd.NDArray._sync_copyfrom = _noted_call, _noted_copy
        self._before, _this_thread.calls = _this_thread.calls, []
        return _this_thread.calls

    def __exit__(self, *error: Any) -> None:
        _this_thread.calls = self._before


def by_array(calls: Calls, num_arrays: int) -> list[dict[str, Any]]:
    """Return the numbers with which each array was updated by these calls, by parameters' names.

    One operator may update several arrays: then ``lrs`` has one number per array, and ``momentum``
    one for all. Where the numbers cannot be told apart by array, different ones are a tuple.
    """
    if num_arrays == len(calls) == 1 and {*map(type, calls[0][1])} <= {float, bool}:
        return [dict(zip(*calls[0]))]  # faster
    of_names: dict[str, list] = {}
    for name, value in (pair for names, values in calls for pair in zip(names, values)):
        if name.startswith("num_"):  # how many arrays are updated together
            continue
        is_list = isinstance(value, (list, tuple))
        several = value if is_list else [value]
        if several and all(isinstance(each, (numbers.Real, np.bool_)) for each in several):
            key = name.rstrip("s") if is_list else name
            of_names.setdefault(key, []).extend(map(float, several))
    for name, values in of_names.items():
        if len(values) != num_arrays:
            different = tuple(dict.fromkeys(values))
            of_names[name] = [different if different[1:] else different[0]] * num_arrays
    return [dict(zip(of_names, values)) for values in zip(*of_names.values())]


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
