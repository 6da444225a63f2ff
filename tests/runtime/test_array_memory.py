"""What is read from the fields of an array is what MXNet's own interface says."""

import ctypes
import struct

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from gluonpar.runtime import memory
from tests.support.contexts import contexts

DTYPES = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64")
CTX = contexts(2)[1]


def of_every_kind():
    for ndim in range(1, 7):
        for dtype in DTYPES:
            yield mx.nd.ones((3, 2, 1, 4, 1, 2)[:ndim], CTX, dtype)
    whole = mx.nd.arange(24, ctx=CTX).reshape((4, 6))
    yield from (whole[1:3], whole[2], whole.T, whole.reshape((2, 3, 4)))
    yield mx.nd.ones((4, 2), CTX).tostype("row_sparse")
    yield mx.nd.sparse.zeros("csr", (2, 3), mx.cpu(7))
    yield mx.np.ones((), ctx=CTX)
    yield mx.np.ones((0, 3), ctx=CTX)
    yield mx.np.ones((2, 2), dtype="bool", ctx=CTX)


def test_kind_and_context_are_those_of_mxnet():
    with mx.util.np_shape(True):
        for array in of_every_kind():
            dtype = np.dtype(array.dtype)
            assert memory.kind(array) == (array.shape, dtype, array.stype)
            assert memory.context(array) == array.context
            assert memory.num_bytes(array) == np.prod(array.shape) * dtype.itemsize


@pytest.mark.cpu("the memory of GPUs cannot be viewed")
def test_an_array_that_has_no_memory_yet_can_be_viewed():
    late = mx.nd.NDArray(mx.nd.ndarray._new_alloc_handle((5,), mx.cpu(), True, np.float32))
    memory.view(late)[:] = 7
    assert late.asnumpy().tolist() == [7] * 5


@pytest.mark.cpu("CPU contexts are allocated here")
@pytest.mark.parametrize(
    ("what", "gap", "wider"),
    [
        ("_ARRAY", "8x", "16x"),
        ("_ARRAY", "8xQ", "16xQ"),
        ("_CHUNK", "8x", "16x"),
        ("_CHUNK", "?", "8x?"),
    ],
)
def test_arrays_that_lie_otherwise_in_memory_are_an_error(what, gap, wider, monkeypatch):
    """As those of an MXNet that was built otherwise, with a field more."""
    changed = struct.Struct(getattr(memory, what).format.replace(gap, wider, 1))
    monkeypatch.setattr(memory, what, changed)
    monkeypatch.setattr(memory, f"{what}_BYTES", ctypes.c_char * changed.size)
    monkeypatch.setattr(memory, "_layout_checked", False)
    with pytest.raises(RuntimeError, match=r"libmxnet.so it reads .* Install mxnet==1.9.1"):
        gluonpar.allreduce([mx.nd.ones((2,), mx.cpu(i)) for i in range(2)])
