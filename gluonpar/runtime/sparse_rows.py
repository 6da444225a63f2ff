"""The rows of a row_sparse array on a CPU context, read and written inside an operator.

How many there are is known when the operator runs, and MXNet's own functions for them wait for the
array, which an operator must not. Private to MXNet 1.9.1: functions of ``NDArray`` and ``Chunk``,
and the layout of ``TShape`` (include/mxnet/ndarray.h, tuple.h), which indices begin with as well.
"""

from __future__ import annotations

import ctypes

import mxnet as mx
import numpy as np
from mxnet.base import _LIB

from gluonpar.runtime import memory


class _Shape(ctypes.Structure):
    """A TShape of at most four dimensions."""

    _fields_ = [
        ("ndim", ctypes.c_int),
        ("num_on_heap", ctypes.c_int),
        ("lengths", ctypes.c_int64 * 4),
        ("heap", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, *lengths: int) -> _Shape:
        return cls(len(lengths), 0, (ctypes.c_int64 * 4)(*lengths), None)


_MOST_DIMENSIONS = 4
_BLOB_BYTES = 256  # more than a TBlob, which begins with the address
_INDICES = ctypes.c_size_t(0)  # the number of the only auxiliary array
_CHUNK = "_ZN5mxnet7NDArray5Chunk"
_pointer = ctypes.c_void_p


def _function(name: str, result: type | None, *arguments: type) -> ctypes._CFuncPtr:
    function = _LIB[name]
    function.restype, function.argtypes = result, arguments
    return function


def _num_rows(array: mx.nd.NDArray) -> int:
    # const TShape& NDArray::aux_shape(size_t) const
    get = _function("_ZNK5mxnet7NDArray9aux_shapeEm", _pointer, _pointer, ctypes.c_size_t)
    return _Shape.from_address(get(array.handle, _INDICES)).lengths[0]


def _indices(array: mx.nd.NDArray, number: int) -> np.ndarray:
    # TBlob NDArray::aux_data(size_t) const; the caller passes where the TBlob is to be
    name = "_ZNK5mxnet7NDArray8aux_dataEm"
    get = _function(name, None, _pointer, _pointer, ctypes.c_size_t)
    blob = ctypes.create_string_buffer(_BLOB_BYTES)
    get(blob, array.handle, _INDICES)
    return _view(_pointer.from_buffer(blob).value, number, np.dtype("int64"))


def _view(address: int, number: int, dtype: np.dtype) -> np.ndarray:
    memory_of = (ctypes.c_char * (number * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory_of, dtype, number)


def read(array: mx.nd.NDArray) -> tuple[np.ndarray, np.ndarray]:
    """Return views of the indices of ``array``, int64 and rising, and of its rows (n, size).

    Call it in a function given to ``engine.push`` that reads or writes ``array``.
    """
    shape, dtype, _ = memory.kind(array)
    size, number = int(np.prod(shape[1:], dtype=np.int64)), _num_rows(array)
    if not number:
        return np.empty(0, np.int64), np.empty((0, size), dtype)
    values = _view(memory.address(array), number * size, dtype)
    return _indices(array, number), values.reshape(number, size)


def write(array: mx.nd.NDArray, indices: np.ndarray, rows: np.ndarray) -> None:
    """Give ``array`` other rows; called as :func:`read`, with what that returns."""
    shape, dtype, _ = memory.kind(array)
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"row_sparse arrays must have at most 4 dimensions, got shape {shape}")
    number, handle = len(indices), array.handle
    # void NDArray::CheckAndAllocAuxData(size_t, const TShape&) const
    name, kinds = "_ZNK5mxnet7NDArray20CheckAndAllocAuxDataEmRKNS_6TShapeE", (_pointer,)
    allocate_indices = _function(name, None, _pointer, ctypes.c_size_t, *kinds)
    allocate_indices(handle, _INDICES, ctypes.byref(_Shape.of(number)))
    # void Chunk::CheckAndAllocData(const TShape&, int dtype)
    name = f"{_CHUNK}17CheckAndAllocDataERKNS_6TShapeEi"
    allocate_rows = _function(name, None, _pointer, _pointer, ctypes.c_int)
    number_of_dtype = mx.nd.ndarray._DTYPE_NP_TO_MX[dtype.type]
    in_memory = ctypes.byref(_Shape.of(number, *shape[1:]))
    allocate_rows(memory.chunk(array), in_memory, number_of_dtype)
    if number:
        _indices(array, number)[:] = indices
        _view(memory.address(array), rows.size, dtype)[:] = rows.ravel()
