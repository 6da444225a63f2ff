"""Files of MXNet's ``gluon.Trainer.save_states``, read without running anything that is in them.

They are pickles of the states and the optimizer. A pickle names classes and functions, and the
arguments with which to call them. Here the names of MXNet's optimizers, schedules and arrays, and
of NumPy's numbers and arrays, only stand for descriptions; any other name is refused. Nothing is
imported, and no code of MXNet parses the file.
"""

from __future__ import annotations

import io
import itertools
import pickle  # noqa: TID251 - see the docstring
import struct
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.lr_scheduler import LRScheduler

from gluonpar.runtime import memory

_NUMPY = {("numpy", "dtype"), ("numpy", "ndarray")}
_NUMPY |= {("numpy.core.multiarray", name) for name in ("_reconstruct", "scalar")}
_NUMPY |= {("numpy._core.multiarray", name) for name in ("_reconstruct", "scalar")}
_ARRAYS = {("mxnet.ndarray.ndarray", "NDArray"), ("mxnet.numpy.multiarray", "ndarray")}
_MAGIC = 0xF993FAC9, 0xF993FACA  # what MXNet 1 writes before an array of mx.nd, or of mx.np
_DTYPES = "float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool"  # by number


def read(content: bytes) -> tuple[str, dict[str, Any], dict]:
    """Return the name of the optimizer's class, its attributes, and the states by index.

    Raises ValueError for a name that is not known here, and any exception for other content.
    """
    states, optimizer = _Unpickler(io.BytesIO(content)).load()
    attributes = {name: _value(part) for name, part in optimizer.state.items()}
    return optimizer.name, attributes, _value(states)


class _Described:
    """What a pickle says of an object: the name of its class, the arguments, and the state."""

    name: str
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Described:
        self = object.__new__(cls)
        self.args = args
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name: a class of descriptions, or for bytearray bytes."""
        if (module, name) == ("builtins", "bytearray"):
            return bytes
        known = mx.optimizer.Optimizer.opt_registry.values(), LRScheduler.__subclasses__()
        names = {(kind.__module__, kind.__name__) for kind in itertools.chain(*known)}
        is_of_mxnet = module.startswith("mxnet.") and (module, name) in names
        if not is_of_mxnet and (module, name) not in _NUMPY | _ARRAYS:
            raise ValueError(
                f"it refers to {module}.{name}, and reading it could run any code that is in it. "
                "If you trust the file, pass trusted=True"
            )
        return type("_Described", (_Described,), {"name": name})


def _value(part: Any) -> Any:
    """Return the value that ``part`` of the file describes."""
    if isinstance(part, (list, tuple)):
        return type(part)(map(_value, part))
    if isinstance(part, dict):
        return {_value(key): _value(value) for key, value in part.items()}
    if not isinstance(part, _Described):
        return part
    if part.name in ("NDArray", "ndarray"):  # NumPy's own arrays are made by _reconstruct
        raw = part.state["handle"]
        return None if raw is None else memory.from_numpy(_array(raw), mx.cpu()).as_nd_ndarray()
    if part.name == "scalar":
        dtype, content = part.args
        return np.frombuffer(content, _dtype(dtype))[0]
    if part.name == "_reconstruct":
        version, shape, dtype, is_fortran, content = part.state
        array = np.empty(0)
        array.__setstate__((version, shape, _dtype(dtype), is_fortran, content))
        return array
    schedule = object.__new__(getattr(mx.lr_scheduler, part.name))
    vars(schedule).update({name: _value(value) for name, value in part.state.items()})
    return schedule


def _dtype(described: _Described) -> np.dtype:
    (name, *_), (_, byte_order, *_) = described.args, described.state
    dtype = np.dtype(name).newbyteorder(byte_order)
    if dtype.kind not in "biufc":
        raise ValueError(f"it has an array of {dtype}")
    return dtype


def _array(content: bytes) -> np.ndarray:
    """Return the dense array that ``MXNDArraySaveRawBytes`` has written as ``content``."""
    magic, stype, ndim = struct.unpack_from("<Iii", content)
    if magic not in _MAGIC or stype != 0 or not 0 <= ndim <= 32:
        raise ValueError("it has an array that is not dense, or not of MXNet 1")
    *shape, _, _, number = struct.unpack_from(f"<{ndim}qiii", content, 12)  # device, dtype
    data = content[12 + 8 * ndim + 12 :]
    return np.frombuffer(data, _DTYPES[number]).reshape(shape)
