"""The memory of an MXNet array: its kind, its identity, NumPy views of it, and copies to devices.

An array and its views share a ``Chunk``, which holds the engine variable and the memory. Private to
MXNet 1.9.1: the fields and functions of ``NDArray`` and ``Chunk`` (include/mxnet/ndarray.h), and
the layout of ``TShape`` (include/mxnet/tuple.h). Fields are read from memory because MXNet's own
functions for them take longer than a small sum, and for row_sparse arrays they wait for the array.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import struct
import threading
import zlib
from typing import Any, Callable, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import _LIB, NDArrayHandle, check_call

from gluonpar.runtime import interrupts

# An NDArray has: its chunk, the number of dimensions and the first four, an offset in bytes, dtype,
# storage type. A chunk has: an address, the device's type and number, a pointer that is not 0 while
# oneDNN has the values, and whether the memory is still to be allocated.
_ARRAY, _CHUNK = struct.Struct("=Q8xi4x4q8xQi4xi"), struct.Struct("=Q8xii32xQ17x?")
# Offsets of addresses that lead from an NDArray to its gradient: the NDArray has its nnvm::Node,
# that its Imperative::AGInfo (include/mxnet/imperative.h), and that the gradient and grad_req.
_GRAD_OFFSETS = 88, 176, 56
_GRAD_REQ_OFFSET, _ADD = 8, 3
_ADDRESS = struct.Struct("=Q")
_ARRAY_BYTES, _CHUNK_BYTES = ctypes.c_char * _ARRAY.size, ctypes.c_char * _CHUNK.size
_ANY_BYTES: Any = ctypes.c_char * (1 << 46)  # a new type per size would take microseconds
_GPU = mx.Context.devstr2type["gpu"]
_TYPES = {  # by the numbers of a dtype and a storage type
    (i, j): (np.dtype(dtype), stype)
    for i, dtype in mx.nd.ndarray._DTYPE_MX_TO_NP.items()
    for j, stype in mx.nd.ndarray._STORAGE_TYPE_ID_TO_STR.items()
}

_reorder = _LIB["_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv"]  # NDArray::Chunk::Reorder2Default()

_INDICES = ctypes.c_size_t(0)  # a row_sparse array's only auxiliary array has the rows' indices
_BLOB_BYTES = 256  # more than a TBlob, which begins with the address
# A TShape has: its number of dimensions, 0, and up to four dimensions (more would be on the heap).
_TSHAPE, _FIRST_DIMENSION = struct.Struct("ii4qP"), 8
_aux_shape = _LIB["_ZNK5mxnet7NDArray9aux_shapeEm"]  # const TShape& NDArray::aux_shape(size_t)
_aux_shape.restype = ctypes.c_void_p
# TBlob NDArray::aux_data(size_t); the caller passes the place for the TBlob
_aux_data = _LIB["_ZNK5mxnet7NDArray8aux_dataEm"]
# void NDArray::CheckAndAllocAuxData(size_t, const TShape&)
_allocate_indices = _LIB["_ZNK5mxnet7NDArray20CheckAndAllocAuxDataEmRKNS_6TShapeE"]
# void NDArray::Chunk::CheckAndAllocData(const TShape&, int dtype)
_allocate_rows = _LIB["_ZN5mxnet7NDArray5Chunk17CheckAndAllocDataERKNS_6TShapeEi"]

CUDA_RUNTIME = "libcudart.so.11.0"  # libmxnet.so has loaded this one
_layout_checked = False
_kept: list[mx.nd.NDArray] = []  # not freed, which would start the worker of its context
_COPIES_UNDER_WAY = 4
_pinned_lock = threading.Lock()


def check_layout(what: str, got: object, want: object, remedy: str = "") -> None:
    """Raise RuntimeError if what was read from memory is not ``want``, as with another MXNet."""
    if got != want:
        raise RuntimeError(
            f"gluonpar reads {what} from memory as the wheels of MXNet 1.9.1 lay them out, and of "
            f"{mx.libinfo.find_lib_path()[0]} it reads {got}, not {want}. "
            f"Install mxnet==1.9.1{remedy}"
        )


def _check_arrays() -> None:
    """Check the layout of arrays. An import does not: making an array starts MXNet's engine."""
    global _layout_checked
    shape, ctx, dtype = (3, 2, 5, 7), mx.cpu(1), mx.nd.ndarray._DTYPE_NP_TO_MX[np.float16]
    whole = mx.nd.NDArray(mx.nd.ndarray._new_alloc_handle(shape, ctx, True, np.float16))
    with autograd.pause():
        part = whole[1:3]
    _kept.append(part)
    at = ctypes.c_uint64.from_address(whole.handle.value).value
    got = _ARRAY.unpack_from(_ARRAY_BYTES.from_address(part.handle.value))
    check_layout("arrays", got, (at, 4, 2, *shape[1:], 140, dtype, 0))  # so a chunk is there
    device, to_allocate = (ctx.device_typeid, ctx.device_id, 0), _CHUNK_BYTES.from_address(at).raw
    want = (*device, True), (address(whole), *device, False)
    got = _CHUNK.unpack(to_allocate)[1:], _CHUNK.unpack_from(_CHUNK_BYTES.from_address(at))
    check_layout("arrays", got, want)
    _layout_checked = True


def kind(array: mx.nd.NDArray) -> tuple[tuple[int, ...], np.dtype, str]:
    """Return the array's shape, dtype and storage type."""
    fields = _fields(array)
    ndim = fields[1]
    shape = fields[2 : 2 + ndim] if 0 <= ndim <= 4 else array.shape
    return (shape, *_TYPES[fields[-2:]])


def _fields(array: mx.nd.NDArray) -> tuple:
    if not _layout_checked:
        _check_arrays()
    return _ARRAY.unpack_from(_ARRAY_BYTES.from_address(array.handle.value))


def _chunk_fields(array: mx.nd.NDArray) -> tuple:
    return _CHUNK.unpack_from(_CHUNK_BYTES.from_address(chunk(array)))


def context(array: mx.nd.NDArray) -> mx.Context:
    """Return the array's context, which is the same object for all arrays on it."""
    return _context(*_chunk_fields(array)[1:3])


def fingerprint(array: mx.nd.NDArray) -> tuple[int, bytes, bytes]:
    """Return the fields that determine the array's kind, context, chunk and address.

    Two live arrays with equal fingerprints are the same. Raises TypeError for other objects.
    """
    if not isinstance(array, mx.nd.NDArray):
        raise TypeError(f"an MXNet array is needed, got {type(array).__name__}")
    if not _layout_checked:
        _check_arrays()
    handle = array.handle.value
    fields = _ARRAY_BYTES.from_address(handle).raw
    return handle, fields, _CHUNK_BYTES.from_address(_ADDRESS.unpack_from(fields)[0]).raw


@functools.lru_cache(None)
def _context(device_typeid: int, device_id: int) -> mx.Context:
    return mx.Context(mx.Context.devtype2str[device_typeid], device_id)


def chunk(array: mx.nd.NDArray) -> int:
    """Return the chunk's address, which two arrays share if and only if they share a variable."""
    if not _layout_checked:
        _check_arrays()
    return ctypes.c_uint64.from_address(array.handle.value).value


def extent(array: mx.nd.NDArray) -> tuple[int, int, int]:
    """Return the chunk's address, and the bytes in it at which the array begins and ends."""
    fields = _fields(array)
    return fields[0], fields[6], fields[6] + num_bytes(array)


def grad_chunk(array: mx.nd.NDArray) -> int | None:
    """Return :func:`chunk` of the gradient, or None. Takes less time than ``array.grad``."""
    grad = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetGrad(array.handle, ctypes.byref(grad)))
    if grad.value is None:
        return None
    address_of_chunk = ctypes.c_uint64.from_address(grad.value).value
    check_call(_LIB.MXNDArrayFree(grad))
    return address_of_chunk


def grad_pointer(array: mx.nd.NDArray) -> ctypes.c_uint64:
    """Return the place in MXNet's memory from which :func:`grad_chunk` takes what it returns.

    Keep the array's variable (:func:`gluonpar.runtime.tape.graph_of`) as long as this is read.
    """
    pointer = ctypes.c_uint64.from_address(_follow(array, _GRAD_OFFSETS))
    check_layout("gradients", pointer.value, grad_chunk(array))
    return pointer


def adds_grads(array: mx.nd.NDArray) -> bool:
    """Return whether backward adds to the array's gradient (``grad_req='add'``).

    Call :func:`grad_pointer` first: it raises RuntimeError if memory has another layout.
    """
    place = _follow(array, _GRAD_OFFSETS[:2]) + _GRAD_REQ_OFFSET
    return ctypes.c_int.from_address(place).value == _ADD


def _follow(array: mx.nd.NDArray, offsets: Sequence[int]) -> int:
    chunk(array)  # checks the layout of arrays
    place = array.handle.value
    for offset in offsets:
        place = ctypes.c_uint64.from_address(place + offset).value
    return place


def alias(handle: NDArrayHandle) -> mx.nd.NDArray:
    """Return another array with the memory and the gradient of the array of ``handle``."""
    other = NDArrayHandle()
    check_call(_LIB.MXShallowCopyNDArray(handle, ctypes.byref(other)))
    return mx.nd.NDArray(other)


def set_grad_flags(arrays: Iterable[mx.nd.NDArray], written: bool) -> None:
    """For arrays with a gradient, set MXNet's flag that says whether backward has written it."""
    set_flag = _LIB.MXNDArraySetGradState
    for array in arrays:
        set_flag(array.handle, written)  # fails and does nothing where there is no gradient


def grad_flags(arrays: Iterable[mx.nd.NDArray]) -> list[bool]:
    """Return for each array MXNet's flag that says whether backward has written its gradient."""
    flag, written = ctypes.c_int(), []
    get, result = _LIB.MXNDArrayGetGradState, ctypes.byref(flag)
    for array in arrays:
        get(array.handle, result)
        written.append(flag.value != 0)
    return written


class any_shape:  # noqa: N801 - a context manager
    """Let arrays have no dimensions or no elements. ``mx.util.np_shape`` would log a warning."""

    @interrupts.whole
    def __enter__(self) -> None:
        self._before = ctypes.c_int()
        check_call(_LIB.MXSetIsNumpyShape(1, ctypes.byref(self._before)))

    @interrupts.whole
    def __exit__(self, *error: Any) -> None:
        check_call(_LIB.MXSetIsNumpyShape(self._before, ctypes.byref(ctypes.c_int())))


def num_bytes(array: mx.nd.NDArray) -> int:
    """Return the number of bytes of the array's elements."""
    shape, dtype, _ = kind(array)
    return math.prod(shape) * dtype.itemsize


def reorder(arrays: Iterable[mx.nd.NDArray]) -> None:
    """Convert arrays that oneDNN has left in its own layout, where view() may be called."""
    for array in arrays:
        _reorder(ctypes.c_void_p(chunk(array)))


def address(array: mx.nd.NDArray) -> int:
    """Return the address of a dense array's elements. Call this where view() may be called."""
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0


def view(array: mx.nd.NDArray) -> np.ndarray:
    """Return a flat NumPy array that shares memory with the dense ``array`` on a CPU context.

    Does not wait, so call it in a function given to ``engine.push`` that writes ``array``. If
    oneDNN has left the array in its own layout, it is first converted to the ordinary one.
    """
    return views([array])[0]


def views(arrays: Sequence[mx.nd.NDArray]) -> list[np.ndarray]:
    """Return :func:`view` of each of ``arrays``, of one size and dtype. ValueError for GPUs."""
    shape, dtype, _ = kind(arrays[0])
    size, flat = math.prod(shape), []
    if not size:  # MXNet has allocated no memory
        return [np.empty(0, dtype) for _ in arrays]
    for array in arrays:
        fields = _ARRAY.unpack_from(_ARRAY_BYTES.from_address(array.handle.value))
        of_chunk = _CHUNK.unpack_from(_CHUNK_BYTES.from_address(fields[0]))
        start, device_typeid, _, of_onednn, unallocated = of_chunk
        if device_typeid == _GPU:
            raise ValueError(f"arrays must be on CPU contexts to be viewed, got {array.context}")
        if of_onednn:
            reorder([array])
        start = address(array) if of_onednn or unallocated else start + fields[6]
        flat.append(_elements(start, size, dtype))
    return flat


def memory_of(arrays: Sequence[mx.nd.NDArray]) -> Callable[[], list[bytes]]:
    """Return a function that reads where the arrays' chunks have their memory now.

    While it returns the same, :func:`views` of the arrays are the same. It keeps no array alive,
    and must be called only while they are.
    """
    chunks = [_CHUNK_BYTES.from_address(chunk(array)) for array in arrays]
    return lambda: [each.raw for each in chunks]


def checksum(array: mx.nd.NDArray) -> int:
    """Return a dense array's CRC-32, on any context. Call this where view() may be called."""
    if array.context.device_type == "cpu":
        return zlib.crc32(view(array).data)
    copy = np.empty(num_bytes(array), "u1")
    cuda, on_host = ctypes.CDLL(CUDA_RUNTIME), ctypes.c_void_p(copy.ctypes.data)
    size, to_host = ctypes.c_size_t(copy.size), 2
    failed = cuda.cudaMemcpy(on_host, ctypes.c_void_p(address(array)), size, to_host)
    if failed:
        raise RuntimeError(f"cudaMemcpy failed with error {failed}")
    return zlib.crc32(copy.data)


def _elements(start: int, size: int, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(_ANY_BYTES.from_address(start), dtype, size)


def read_rows(array: mx.nd.NDArray) -> tuple[np.ndarray, np.ndarray]:
    """Return views of a row_sparse array's indices (n,), int64 and rising, and rows (n, size).

    The array is on a CPU context. Call this in a function given to ``engine.push`` that uses it.
    """
    shape, dtype, _ = kind(array)
    number_at = _aux_shape(array.handle, _INDICES) + _FIRST_DIMENSION
    size, number = math.prod(shape[1:]), ctypes.c_int64.from_address(number_at).value
    if not number:
        return np.empty(0, np.int64), np.empty((0, size), dtype)
    rows = _elements(address(array), number * size, dtype)
    return _indices(array, number), rows.reshape(number, size)


def write_rows(array: mx.nd.NDArray, indices: np.ndarray, rows: np.ndarray) -> None:
    """Replace what :func:`read_rows` returns, in a function that writes the array.

    Raises ValueError for more than four dimensions.
    """
    shape, dtype, _ = kind(array)
    if len(shape) > 4:
        raise ValueError(f"row_sparse arrays must have at most 4 dimensions, got shape {shape}")
    number, dtype_number = len(indices), mx.nd.ndarray._DTYPE_NP_TO_MX[dtype.type]
    _allocate_indices(array.handle, _INDICES, _tshape(number))
    _allocate_rows(ctypes.c_void_p(chunk(array)), _tshape(number, *shape[1:]), dtype_number)
    if number:
        _indices(array, number)[:] = indices
        _elements(address(array), rows.size, dtype)[:] = rows.ravel()


def _tshape(*lengths: int) -> bytes:
    return _TSHAPE.pack(len(lengths), 0, *lengths, *[0] * (4 - len(lengths)), 0)


def _indices(array: mx.nd.NDArray, number: int) -> np.ndarray:
    blob = ctypes.create_string_buffer(_BLOB_BYTES)
    _aux_data(blob, array.handle, _INDICES)
    return _elements(ctypes.c_uint64.from_buffer(blob).value, number, np.dtype("int64"))


def zero(arrays: Sequence[mx.nd.NDArray]) -> None:
    """Set every element of ``arrays`` to zero, in place; row_sparse arrays then have no rows."""
    by_context: dict[mx.Context, list[mx.nd.NDArray]] = {}
    with autograd.pause():  # if it were recorded, reset_arrays would end the process
        for array in arrays:
            if array.stype == "row_sparse":
                none = mx.nd.sparse.zeros("row_sparse", array.shape, array.context, array.dtype)
                none.copyto(array)
            elif num_bytes(array):
                dense = array.as_nd_ndarray()
                dense = dense if dense.ndim else dense.reshape((1,))  # reset_arrays needs this
                by_context.setdefault(context(array), []).append(dense)
        for same in by_context.values():
            mx.nd.reset_arrays(*same, num_arrays=len(same))


def from_numpy(values: np.ndarray, ctx: mx.Context) -> mx.nd.NDArray:
    """Return a copy of ``values`` on ``ctx``: ``mx.np`` under ``npx.set_np()``, else ``mx.nd``.

    On a CPU context this does not wait; ``mx.nd.array`` waits for the context's earlier operators.
    Values for a GPU go through pinned memory, and this waits for the copy four calls before;
    ``mx.nd.array`` waits for its own copy.
    """
    empty = mx.np.empty if mx.util.is_np_array() else mx.nd.empty
    array = empty(values.shape, dtype=values.dtype, ctx=ctx)
    if not values.size:
        return array
    if ctx.device_type != "gpu":
        np.copyto(view(array).reshape(values.shape), values)
        return array
    with pinned(ctx, values.size, values.dtype) as staged:
        check_call(_LIB.MXNDArrayWaitToWrite(staged.handle))  # for the last copy from this array
        np.copyto(view(staged).reshape(values.shape), values)
        staged.reshape(values.shape).copyto(array.as_nd_ndarray())
    return array


@contextlib.contextmanager
def pinned(ctx: mx.Context, size: int, dtype: np.dtype | str) -> Iterator[mx.nd.NDArray]:
    """Yield a flat array in the GPU's pinned memory, which is kept and used again.

    Push all operators on it before the ``with`` block ends; until then other threads wait for it.
    """
    with _pinned_lock, autograd.pause():  # a slice that is recorded would be a copy
        rounded = 1 << (size - 1).bit_length()  # so that arrays of few sizes are kept
        yield next(_pinned(ctx.device_id, rounded, np.dtype(dtype)))[:size]


@functools.lru_cache(None)  # MXNet does not keep pinned memory, and allocating it takes long
def _pinned(device_id: int, size: int, dtype: np.dtype) -> Iterator[mx.nd.NDArray]:
    """Return an endless iterator over four flat arrays: four copies can be under way."""
    ctx = mx.cpu_pinned(device_id)
    return itertools.cycle(mx.nd.empty((size,), ctx, dtype) for _ in range(_COPIES_UNDER_WAY))
