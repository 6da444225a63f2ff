"""The rows of a row_sparse array on a CPU context, read and written inside an operator.

MXNet's own functions for them wait for the array, which an operator must not. Private to MXNet
1.9.1: functions of ``NDArray`` and ``Chunk`` (include/mxnet/ndarray.h), and the layout of
``TShape`` (include/mxnet/tuple.h).
"""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB

from gluonpar.runtime import memory

_BLOB_BYTES = 256  # more than a TBlob, which begins with the address
_INDICES = ctypes.c_size_t(0)  # the number of the only auxiliary array
_pointer = ctypes.c_void_p
# A TShape: its number of dimensions, 0, and up to four dimensions (more would be on the heap).
_SHAPE, _FIRST_DIMENSION = struct.Struct("ii4qP"), 8

# const TShape& NDArray::aux_shape(size_t) const
_aux_shape = _LIB["_ZNK5mxnet7NDArray9aux_shapeEm"]
_aux_shape.restype = _pointer
# TBlob NDArray::aux_data(size_t) const; the caller passes where the TBlob is to be
_aux_data = _LIB["_ZNK5mxnet7NDArray8aux_dataEm"]
_aux_data.restype = None
# void NDArray::CheckAndAllocAuxData(size_t, const TShape&) const
_allocate_indices = _LIB["_ZNK5mxnet7NDArray20CheckAndAllocAuxDataEmRKNS_6TShapeE"]
_allocate_indices.restype = None
# void Chunk::CheckAndAllocData(const TShape&, int dtype)
_allocate_rows = _LIB["_ZN5mxnet7NDArray5Chunk17CheckAndAllocDataERKNS_6TShapeEi"]
_allocate_rows.restype = None


def _shape(*lengths: int) -> bytes:
    return _SHAPE.pack(len(lengths), 0, *lengths, *[0] * (4 - len(lengths)), 0)


def _indices(array: mx.nd.NDArray, number: int) -> np.ndarray:
    blob = ctypes.create_string_buffer(_BLOB_BYTES)
    _aux_data(blob, array.handle, _INDICES)
    return _view(ctypes.c_uint64.from_buffer(blob).value, number, np.dtype("int64"))


def _view(address: int, number: int, dtype: np.dtype) -> np.ndarray:
    elements: Any = (ctypes.c_char * (number * dtype.itemsize)).from_address(address)
    return np.frombuffer(elements, dtype, number)


def read(array: mx.nd.NDArray) -> tuple[np.ndarray, np.ndarray]:
    """Return views of the indices of ``array``, int64 and rising, and of its rows (n, size).

    Call it in a function given to ``engine.push`` that reads or writes ``array``.
    """
    shape, dtype, _ = memory.kind(array)
    number_at = _aux_shape(array.handle, _INDICES) + _FIRST_DIMENSION
    size, number = math.prod(shape[1:]), ctypes.c_int64.from_address(number_at).value
    if not number:
        return np.empty(0, np.int64), np.empty((0, size), dtype)
    values = _view(memory.address(array), number * size, dtype)
    return _indices(array, number), values.reshape(number, size)


def write(array: mx.nd.NDArray, indices: np.ndarray, rows: np.ndarray) -> None:
    """Replace the indices and rows of ``array``; both, and where to call this, as in :func:`read`.

    Raises ValueError for more than four dimensions.
    """
    shape, dtype, _ = memory.kind(array)
    if len(shape) > 4:
        raise ValueError(f"row_sparse arrays must have at most 4 dimensions, got shape {shape}")
    number, dtype_number = len(indices), mx.nd.ndarray._DTYPE_NP_TO_MX[dtype.type]
    _allocate_indices(array.handle, _INDICES, _shape(number))
    _allocate_rows(_pointer(memory.chunk(array)), _shape(number, *shape[1:]), dtype_number)
    if number:
        _indices(array, number)[:] = indices
        _view(memory.address(array), rows.size, dtype)[:] = rows.ravel()
