"""The IDX reader: it reads what was written; anything else is a ValueError with the reason."""

from __future__ import annotations

import gzip
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from idx_files import encode, gz

from gluonpar.training.data import fashion_mnist

SHAPES = st_numpy.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)
ARRAYS = st_numpy.arrays(np.uint8, SHAPES)
SAMPLE = np.arange(60, dtype=np.uint8).reshape(3, 4, 5)


def read(raw: bytes, shape: tuple) -> np.ndarray:
    return fashion_mnist.decode(fashion_mnist.unpack(raw, shape, "FILE"), shape, "FILE")


@given(ARRAYS, st.booleans())
def test_what_was_written_is_read(array, compressed):
    raw = gz(encode(array)) if compressed else encode(array)
    found = read(raw, array.shape)
    assert found.dtype == np.uint8
    assert found.shape == array.shape
    np.testing.assert_array_equal(found, array)
    assert len(raw) <= fashion_mnist.max_file_bytes(array.shape)


@given(ARRAYS, st.booleans(), st.data())
def test_every_truncation_is_named(array, compressed, data):
    raw = gz(encode(array)) if compressed else encode(array)
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    with pytest.raises(ValueError, match="^FILE: .*(truncated|damaged).*expected"):
        read(cut, array.shape)


@given(ARRAYS, st.binary(min_size=1, max_size=9), st.booleans())
def test_trailing_garbage_is_named(array, garbage, compressed):
    raw = gz(encode(array)) if compressed else encode(array)
    with pytest.raises(ValueError, match=f"^FILE: .*{len(garbage)} bytes of trailing garbage"):
        read(raw + garbage, array.shape)


@given(st.integers(0, 8 * 16 - 1))
def test_a_flipped_bit_in_the_header_is_an_error(bit):
    raw = bytearray(encode(SAMPLE))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="^FILE: .*expected"):
        read(bytes(raw), SAMPLE.shape)


@given(st.binary(max_size=64), SHAPES)
def test_arbitrary_bytes_are_an_error_or_an_array_of_that_shape(raw, shape):
    for whole in (raw, b"\x1f\x8b" + raw, gz(raw)):
        try:
            assert read(whole, shape).shape == shape
        except ValueError as error:
            assert str(error).startswith("FILE: ")


def test_a_header_that_claims_two_to_the_31_allocates_nothing():
    raw = b"\x00\x00\x08\x01\x80\x00\x00\x00"
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"dimensions \(2147483648,\); expected \(9,\)"):
            read(raw, (9,))
        with pytest.raises(ValueError, match="truncated by 2147483648 bytes"):
            read(raw, (2**31,))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_a_gzip_bomb_is_bounded_by_the_size_expected():
    bomb = gzip.compress(bytes(50_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="the gzip holds more than the 17 bytes expected"):
            read(bomb, (9,))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_the_array_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        read(encode(SAMPLE), SAMPLE.shape)[0] = 1
