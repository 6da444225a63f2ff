"""npz_file: what was written is read; a file that is damaged or of another kind is a ValueError."""

import contextlib
import io

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from gluonpar.checkpoint import files, npz_file

DTYPES = st.sampled_from(["f2", "f4", "f8", "?", "u1", "i1", "i4", "i8", "u4"])
SHAPES = st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
VALUES = {"a": np.float32(0.5), "b": np.int64(3), "c": [None, True, "\u00e9"]}


def written(path, header):
    npz_file.write(path / "a", header)
    return (path / "a").read_bytes()


def read(content):
    """The header, and the shapes, dtypes and bits of the arrays whose numbers it has."""
    with files.loading("a"):
        header, arrays = npz_file.read(content)
        return header, bits(arrays[i] for i in header["arrays"])


def bits(arrays):
    return [(array.shape, array.dtype, array.tobytes()) for array in arrays]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st_numpy.arrays(DTYPES, SHAPES), max_size=12))
def test_what_was_written_is_read_bit_for_bit(tmp_path, arrays):
    header, found = read(written(tmp_path, {**VALUES, "arrays": arrays}))
    assert header == {**VALUES, "arrays": [*range(len(arrays))]} and found == bits(arrays)


def test_every_truncation_is_refused_and_no_flipped_bit_changes_a_value(tmp_path):
    """Some bits, as in the time when a member was written, have no use."""
    good = written(tmp_path, {"a": 1, "arrays": [np.arange(3.0)]})
    for place in range(len(good)):
        with pytest.raises(ValueError, match="^a cannot be loaded"):
            read(good[:place])
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        with contextlib.suppress(ValueError):
            assert read(bytes(bad)) == read(good)


def test_an_array_that_lost_its_end_is_refused(tmp_path):
    """NumPy would read it only up to its new length, and not come to its CRC-32."""
    content = written(tmp_path, {"arrays": [np.arange(2000.0)]})
    assert content.count(b"(2000,)") == 1
    with pytest.raises(ValueError, match="damaged: 0.npy"):
        read(content.replace(b"(2000,)", b"(1000,)"))


def of_objects():
    file = io.BytesIO()
    np.savez(file, header=np.frombuffer(b"{}", "uint8"), **{"0": np.array([{}], dtype=object)})
    return file.getvalue()


@pytest.mark.parametrize("content", [b"", b"text", b"\x80\x04N.", of_objects()])
def test_other_content_is_refused(content):
    with pytest.raises(ValueError, match="^a cannot be loaded"):
        read(content)
