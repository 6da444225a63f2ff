"""The numbers that MXNet's operators are given while a function runs, such as rates in an update.

An operator has numbers as parameters (``lr=0.1``), or in an array that is copied from the host. So
from the first use on two functions of MXNet 1.9.1 are replaced: the one that calls operators, and
the one that copies arrays.
"""

from __future__ import annotations

import contextlib
import numbers
import threading
import zlib
from typing import Any, Iterator, List, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import register

Numbers = List[Tuple[str, Any]]  # the parameter's name, and a number or a list of numbers

_MOST_ELEMENTS = 256  # of an array that is noted as it is; of a larger one, its checksum is
_call, _copy = register._imperative_invoke, mx.nd.NDArray._sync_copyfrom


class _Thread(threading.local):
    noted: Numbers | None = None


_this_thread = _Thread()


@contextlib.contextmanager
def noted() -> Iterator[Numbers]:
    """Yield a list, to which the numbers are appended that this thread's operators are given."""
    if register._imperative_invoke is _call:  # for good, as changing a class makes its methods slow
        register._imperative_invoke, mx.nd.NDArray._sync_copyfrom = _noted_call, _noted_copy
    before, _this_thread.noted = _this_thread.noted, []
    try:
        yield _this_thread.noted
    finally:
        _this_thread.noted = before


def by_array(used: Numbers, num_arrays: int) -> list[dict[str, Any]]:
    """Return, for each array that was updated by them, the numbers by the parameter's name.

    They are floats. Several arrays may be updated by one operator, or by some, in which ``lrs`` has
    one number per array, and ``momentum`` one for all. Several different numbers are a tuple.
    """
    of_names: dict[str, list] = {}
    for name, value in used:
        if isinstance(value, (list, tuple)):
            of_names.setdefault(name.rstrip("s"), []).extend(map(float, value))
        else:
            of_names.setdefault(name, []).append(float(value))
    for name, values in of_names.items():
        if len(values) != num_arrays:
            different = tuple(dict.fromkeys(values))
            of_names[name] = [different if different[1:] else different[0]] * num_arrays
    return [dict(zip(of_names, values)) for values in zip(*of_names.values())]


def _noted_call(handle: Any, arrays: Any, names: Any, values: Any, *rest: Any) -> Any:
    if _this_thread.noted is not None:
        _this_thread.noted += [
            (name, value)
            for name, value in zip(names, values)
            if (type(value) is float or _are_numbers(value)) and not name.startswith("num_")
        ]
    return _call(handle, arrays, names, values, *rest)


def _are_numbers(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(each, (numbers.Real, np.bool_)) for each in values)


def _noted_copy(array: mx.nd.NDArray, source: Any) -> None:
    if _this_thread.noted is not None:
        values = np.asarray(source)
        few = values.size <= _MOST_ELEMENTS
        value = values.tolist() if few else zlib.crc32(np.ascontiguousarray(values).data)
        _this_thread.noted.append(("array", value))
    _copy(array, source)
