"""The numbers that MXNet's operators are given while a function runs, such as rates in an update.

An operator has numbers as parameters (``lr=0.1``), or in an array that is copied from the host. So
while numbers are noted, two functions of MXNet 1.9.1 are replaced: the one that calls operators,
and the one that copies arrays.
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
_lock, _num_noting = threading.Lock(), 0


class _Thread(threading.local):
    noted: Numbers | None = None


_this_thread = _Thread()


@contextlib.contextmanager
def noted() -> Iterator[Numbers]:
    """Yield a list, to which the numbers are appended that this thread's operators are given."""
    global _num_noting
    with _lock:
        _num_noting += 1
        register._imperative_invoke, mx.nd.NDArray._sync_copyfrom = _noted_call, _noted_copy
    before, _this_thread.noted = _this_thread.noted, []
    try:
        yield _this_thread.noted
    finally:
        _this_thread.noted = before
        with _lock:
            _num_noting -= 1
            if not _num_noting:
                register._imperative_invoke, mx.nd.NDArray._sync_copyfrom = _call, _copy


def by_name(used: Numbers, num_arrays: int) -> dict[str, list]:
    """Return the numbers by the parameter's name, one per array that was updated by them.

    Several arrays may be updated by one operator, or by some, in which ``lrs`` has one number per
    array, and ``momentum`` one for all.
    """
    found: dict[str, list] = {}
    for name, value in used:
        is_list = isinstance(value, (list, tuple))
        values = found.setdefault(name.rstrip("s") if is_list else name, [])
        values.extend(value if is_list else [value])
    for name, values in found.items():
        if len(values) != num_arrays:
            different = [*dict.fromkeys(values)]
            found[name] = [different[0] if len(different) == 1 else different] * num_arrays
    return found


def _noted_call(handle: Any, arrays: Any, names: Any, values: Any, *rest: Any) -> Any:
    if _this_thread.noted is not None:
        _this_thread.noted += [
            (name, value)
            for name, value in zip(names, values)
            if _are_numbers(value) and not name.startswith("num_")  # of arrays updated together
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
