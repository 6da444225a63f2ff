"""sealed_npz: what was packed is unpacked; anything else is a ValueError and takes no memory."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import struct
import zipfile
from typing import Iterator

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from gluonpar.checkpoint import sealed_npz

DTYPES = st.sampled_from(["f2", "f4", "f8", "?", "u1", "i1", "i4", "i8", "u4"])
SHAPES = st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@given(st.lists(st_numpy.arrays(DTYPES, SHAPES), max_size=12))
def test_what_was_packed_is_unpacked_bit_for_bit(arrays):
    header, found = sealed_npz.unpack(sealed_npz.pack({"n": len(arrays)}, arrays))
    assert header == {"n": len(arrays)}
    assert len(found) == len(arrays)
    for one, other in zip(found, arrays):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.tobytes() == other.tobytes()


def test_every_truncation_and_every_flipped_bit_is_refused():
    good = bytes(sealed_npz.pack({"a": 1}, [np.arange(3.0)]))
    for place in range(len(good)):
        with pytest.raises(ValueError, match="SHA-256"):
            sealed_npz.unpack(good[:place])
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        with pytest.raises(ValueError, match="SHA-256"):
            sealed_npz.unpack(bytes(bad))


# Files made by hand, with a correct checksum


def sealed_zip(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    sealed_npz.seal(buffer)
    return buffer.getvalue()


def npy(shape: str = "(2,)", dtype: str = "'<f4'", content: bytes = bytes(8)) -> bytes:
    """A .npy file with this header, right or wrong."""
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def as_member(text: bytes) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.frombuffer(text, "uint8"))
    return buffer.getvalue()


@contextlib.contextmanager
def memory_limit(num_bytes: int = 256 << 20) -> Iterator[None]:
    """Let this process reserve at most ``num_bytes`` more address space; MemoryError beyond."""
    used = psutil.Process().memory_info().vms
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


GOOD = {"header.npy": as_member(b"{}"), "0.npy": npy()}
MALFORMED = {
    "no member": {},
    "a missing number": {"header.npy": GOOD["header.npy"], "1.npy": npy()},
    "an empty member": {**GOOD, "0.npy": b""},
    "too few bytes": {**GOOD, "0.npy": npy(content=bytes(7))},
    "negative shape": {**GOOD, "0.npy": npy("(-2,)")},
    "huge shape": {**GOOD, "0.npy": npy("(1099511627776,)")},
    "objects": {**GOOD, "0.npy": npy(dtype="'|O'")},
    "code": {**GOOD, "0.npy": npy("__import__('os').abort()")},
    "deep nesting": {**GOOD, "0.npy": npy("(" * 9000 + ")" * 9000)},
    "no JSON": {"header.npy": as_member(b"{")},
    "deeply nested JSON": {"header.npy": as_member(b"[" * 200_000)},
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_content_is_refused(what):
    content = sealed_zip(MALFORMED[what])
    with memory_limit(), pytest.raises(ValueError):
        sealed_npz.unpack(content)


def test_compressed_members_are_refused_before_they_are_unpacked():
    size = 100 << 20
    bomb = sealed_zip({**GOOD, "0.npy": bytes(size)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < size / 500
    with memory_limit(size // 2), pytest.raises(ValueError, match="compressed"):
        sealed_npz.unpack(bomb)


def test_members_at_the_same_place_of_the_file_are_refused():
    """A directory that names one large member many times: a small file of gigabytes."""
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
    sealed_npz.seal(buffer)
    content = buffer.getvalue()
    assert len(content) < 2 * size
    with memory_limit(), pytest.raises(ValueError, match=str(2001 * size)):
        sealed_npz.unpack(content)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_under_a_correct_checksum_are_refused(content):
    buffer = io.BytesIO(content.ljust(2, b"\x00"))
    sealed_npz.seal(buffer)
    with pytest.raises(ValueError):
        sealed_npz.unpack(buffer.getvalue())


def test_the_header_is_json_and_takes_numbers_of_numpy():
    values = {"a": np.float32(0.5), "b": np.int64(3), "c": [None, True, "\u00e9"]}
    header, _ = sealed_npz.unpack(sealed_npz.pack(values, []))
    assert header == json.loads('{"a": 0.5, "b": 3, "c": [null, true, "\u00e9"]}')
