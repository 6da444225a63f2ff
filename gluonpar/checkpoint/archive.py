"""A JSON header and arrays in one file: NumPy's ``.npz`` without pickles, safe to read.

It is *sealed*: it ends with the SHA-256 of all before it, as the comment that a zip file may have.
``np.load`` opens it all the same; :func:`read` notices what was cut short or changed before it
parses anything. Whoever makes a file by hand can seal it too, so the reader takes nothing on its
word: members are stored, not compressed, and no larger together than the file; their shapes are
held against their bytes. So it never allocates more than a few times the size of the file.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
import zipfile
from typing import Any, Sequence

import numpy as np

_SEAL = b"gluonpar sha256 "
_SEAL_SIZE = len(_SEAL) + 64
# NumPy's format 1.0 (numpy.lib.format): magic, version, the header's length, then a Python literal.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00(?P<size>..)\{'descr': '(?P<dtype>[<|][a-z]\d)', "
    rb"'fortran_order': False, 'shape': \((?P<shape>|\d{1,18},|\d{1,18}(?:, \d{1,18})+)\), \} *\n",
    re.DOTALL,
)
_DTYPES = "<f2 <f4 <f8 |b1 |u1 |i1 <i2 <i4 <i8 <u2 <u4 <u8".split()
_LONGEST_INT = 20  # digits: int() of many takes quadratic time


def sealed(header: dict, arrays: Sequence[np.ndarray]) -> memoryview:
    """The bytes of an archive: ``header`` is what JSON takes, and NumPy's numbers.

    ``arrays`` are of booleans, integers or floats.

    >>> read(sealed({"a": 1}, [np.arange(3)]))
    ({'a': 1}, [array([0, 1, 2])])
    """
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(header, default=np.number.item).encode(), "uint8")
    members = {str(i): np.asarray(array, order="C") for i, array in enumerate(arrays)}
    np.savez(buffer, header=text, **members)
    seal(buffer)
    return buffer.getbuffer()


def seal(buffer: io.BytesIO) -> None:
    """Make the SHA-256 of a zip file without comment its comment."""
    buffer.seek(-2, io.SEEK_END)  # a zip file ends with the length of its comment
    buffer.write(struct.pack("<H", _SEAL_SIZE))
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    buffer.write(_SEAL + digest.encode())


def read(content: bytes | memoryview) -> tuple[Any, list[np.ndarray]]:
    """The header and the arrays, read-only, of a sealed archive; ValueError if it is none."""
    _check_seal(content)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            found = _members(file, len(content))
    except ValueError:
        raise
    except Exception as error:  # zipfile meets a malformed directory with about any
        raise ValueError(f"it is no zip file ({type(error).__name__}: {error})") from error
    header = _array("header", found.pop("header.npy"))
    arrays = [_array(str(i), found.pop(f"{i}.npy")) for i in range(len(found))]
    try:
        return json.loads(header.tobytes().decode(), parse_int=_int), arrays
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error


def _check_seal(content: bytes | memoryview) -> None:
    body, seal_ = content[:-_SEAL_SIZE], bytes(content[-_SEAL_SIZE:])
    if not seal_.startswith(_SEAL):
        raise ValueError("it does not end with gluonpar's seal: cut short, or something else")
    found, written = hashlib.sha256(body).hexdigest(), seal_[len(_SEAL) :]
    if found.encode() != written:
        raise ValueError(
            f"it is damaged: its SHA-256 is {found[:16]}..., but it was written with "
            f"{written[:16].decode('latin-1')}..."
        )


def _members(file: zipfile.ZipFile, num_bytes: int) -> dict[str, bytes]:
    """The content of all members by name, which are "header.npy", "0.npy", "1.npy", ..."""
    members = file.infolist()
    expected = {"header.npy", *(f"{i}.npy" for i in range(len(members) - 1))}
    if {member.filename for member in members} != expected or len(members) != len(expected):
        raise ValueError(f"its members are not header.npy and {len(members) - 1} numbered arrays")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("its members are compressed, which gluonpar never does")
    total = sum(member.file_size for member in members)
    if total > num_bytes:
        raise ValueError(f"its members claim {total} bytes, but the file has {num_bytes}")
    return {member.filename: file.read(member) for member in members}


def _array(name: str, member: bytes) -> np.ndarray:
    """The array in a ``.npy`` file's bytes; a view of them."""
    head = _NPY.match(member)
    if head is None or 10 + struct.unpack("<H", head["size"])[0] != head.end():
        raise ValueError(f"its array {name!r} does not begin as NumPy's format 1.0 does")
    dtype, shape = head["dtype"].decode(), tuple(map(int, re.findall(rb"\d+", head["shape"])))
    if dtype not in _DTYPES:
        raise ValueError(f"its array {name!r} is of {dtype}; expected booleans, integers, floats")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if len(member) - head.end() != size:
        raise ValueError(
            f"its array {name!r} is {shape} of {dtype}, {size} bytes, but there are "
            f"{len(member) - head.end()}"
        )
    return np.frombuffer(member, dtype, math.prod(shape), head.end()).reshape(shape)


def _int(text: str) -> int:
    if len(text) > _LONGEST_INT:
        raise ValueError(f"its header has a number of {len(text)} digits")
    return int(text)
