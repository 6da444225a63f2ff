"""archive: what was sealed is read; whatever else is sealed by hand is a ValueError and no bomb."""

from __future__ import annotations

import io
import json
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from resource_limits import memory_limit

from gluonpar.checkpoint import archive

DTYPES = st.sampled_from(["f2", "f4", "f8", "?", "u1", "i1", "i4", "i8", "u4"])
SHAPES = st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
HEADER = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }"


def packed(members: dict[str, bytes] | list, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A sealed zip file with these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in dict(members).items():
            file.writestr(name, content)
    archive.seal(buffer)
    return buffer.getvalue()


def npy(text: bytes, content: bytes = b"", size: int | None = None) -> bytes:
    """A .npy file with this header; the length it states, unless given, is right."""
    text += b"\n"
    length = struct.pack("<H", len(text) if size is None else size)
    return b"\x93NUMPY\x01\x00" + length + text + content


def as_array(header: object) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.frombuffer(json.dumps(header).encode(), "uint8"))
    return buffer.getvalue()


@given(st.lists(st_numpy.arrays(DTYPES, SHAPES), max_size=12))
def test_what_was_sealed_is_read_bit_for_bit(arrays):
    header, found = archive.read(archive.sealed({"n": len(arrays)}, arrays))
    assert header == {"n": len(arrays)}
    assert len(found) == len(arrays)
    for one, other in zip(found, arrays):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.tobytes() == other.tobytes()


def test_arrays_in_fortrans_order_become_those_in_cs():
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    _, (found,) = archive.read(archive.sealed({}, [array]))
    np.testing.assert_array_equal(found, array)


def test_every_cut_and_every_flipped_bit_is_refused():
    good = bytes(archive.sealed({"a": 1}, [np.arange(3.0)]))
    for place in range(len(good)):
        with pytest.raises(ValueError, match="seal|damaged"):
            archive.read(good[:place])
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        with pytest.raises(ValueError, match="seal|damaged"):
            archive.read(bytes(bad))


GOOD = {"header.npy": as_array({}), "0.npy": npy(HEADER % b"2,", bytes(8))}
MALFORMED = {
    "no member": ({}, "its members are not header.npy and -1"),
    "no header": ({"0.npy": GOOD["0.npy"]}, "its members are not header.npy and 0"),
    "a gap": ({"header.npy": GOOD["header.npy"], "1.npy": GOOD["0.npy"]}, "numbered arrays"),
    "a stranger": ({**GOOD, "x": b""}, "its members are not header.npy and 2 numbered arrays"),
    "empty member": ({**GOOD, "0.npy": b""}, "array '0' does not begin as NumPy's format"),
    "too few bytes": ({**GOOD, "0.npy": npy(HEADER % b"2,", bytes(7))}, "8 bytes, but there are 7"),
    "more bytes": ({**GOOD, "0.npy": npy(HEADER % b"2,", bytes(9))}, "8 bytes, but there are 9"),
    "wrong length": ({**GOOD, "0.npy": npy(HEADER % b"2,", bytes(8), 9)}, "does not begin"),
    "negative": ({**GOOD, "0.npy": npy(HEADER % b"-2,", bytes(8))}, "does not begin as"),
    "objects": ({**GOOD, "0.npy": npy(b"{'descr': '|O', 'fortran_order'")}, "does not begin"),
    "strings": ({**GOOD, "0.npy": npy(HEADER.replace(b"<f4", b"|S4") % b"2,")}, "does not begin"),
    "complex": ({**GOOD, "0.npy": npy(HEADER.replace(b"f4", b"c8") % b"1,")}, "'0' is of <c8;"),
    "code": ({**GOOD, "0.npy": npy(b"__import__('os').abort()")}, "does not begin as NumPy's"),
    "large dimensions of nothing": (
        {**GOOD, "0.npy": npy(HEADER % (b"0, " + b"999999999999999999, " * 5 + b"9"))},
        "",  # NumPy's words, which depend on its version
    ),
    "40 dimensions": ({**GOOD, "0.npy": npy(HEADER % (b"1, " * 39 + b"1"), bytes(4))}, "dimension"),
    "no JSON": ({"header.npy": npy(HEADER % b"1,", bytes(4))}, "Expecting value"),
    "no text": ({"header.npy": npy(HEADER % b"1,", b"\xff" * 4)}, "can't decode"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_contents_under_a_right_seal_are_refused(what):
    members, words = MALFORMED[what]
    with memory_limit(), pytest.raises(ValueError) as caught:
        archive.read(packed(members))
    assert words in str(caught.value)


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a": ' * 100_000, b"1" * 1_000_000])
def test_a_header_that_no_parser_likes_is_refused(text):
    buffer = io.BytesIO()
    np.save(buffer, np.frombuffer(text, "uint8"))
    with memory_limit(), pytest.raises(ValueError, match="nested too deeply|1000000 digits"):
        archive.read(packed({"header.npy": buffer.getvalue()}))


def test_shapes_of_two_to_the_40_allocate_nothing():
    bomb = {**GOOD, "0.npy": npy(HEADER % b"1099511627776,", bytes(8))}
    with memory_limit(), pytest.raises(ValueError, match="4398046511104 bytes, but there are 8"):
        archive.read(packed(bomb))


def test_a_zip_bomb_is_refused_before_it_is_unpacked():
    size = 100 << 20
    bomb = packed({**GOOD, "0.npy": bytes(size)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < size / 500
    with memory_limit(size // 2), pytest.raises(ValueError, match="members are compressed"):
        archive.read(bomb)


def test_members_that_lie_on_one_another_are_refused():
    """A directory that names one large member many times: a small file with gigabytes in it."""
    buffer, size = io.BytesIO(), 1 << 20
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("header.npy", bytes(size))
        (first,) = file.infolist()
        for i in range(2000):
            copy = zipfile.ZipInfo(f"{i}.npy")
            copy.header_offset, copy.CRC = first.header_offset, first.CRC
            copy.file_size = copy.compress_size = size
            file.filelist.append(copy)
            file.NameToInfo[copy.filename] = copy
    archive.seal(buffer)
    content = buffer.getvalue()
    assert len(content) < 2 * size
    with memory_limit(), pytest.raises(ValueError, match=f"claim {2001 * size} bytes, but the fil"):
        archive.read(content)


@given(st.binary(max_size=400))
def test_whatever_is_sealed_is_a_valueerror(content):
    buffer = io.BytesIO(content.ljust(2, b"\x00"))
    archive.seal(buffer)
    with pytest.raises(ValueError, match="zip"):
        archive.read(buffer.getvalue())
