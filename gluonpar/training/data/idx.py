"""The IDX file format: a four-byte magic number, the dimensions, the bytes.

    00 00 08 03 | 00 00 ea 60 | 00 00 00 1c | 00 00 00 1c | pixels ...
    uint8, 3-d    60000         28            28

The magic number's third byte is the element type (08: unsigned byte, the only one here), its fourth
the number of dimensions. After LeCun, Cortes and Burges, "The MNIST database of handwritten
digits". Files may be gzip-compressed. Errors are ValueErrors that begin with the file's ``name``.
"""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np

_GZIP_SLACK = 4096  # what gzip may add: its frame, a name, and five bytes per 16 KiB


def _num_bytes(shape: tuple[int, ...]) -> int:
    return 4 + 4 * len(shape) + math.prod(shape)


def max_file_bytes(shape: tuple[int, ...]) -> int:
    """Return the largest size of a file of this shape, compressed or not, in bytes."""
    size = _num_bytes(shape)
    return size + size // 1024 + _GZIP_SLACK


def unpack(raw: bytes, shape: tuple[int, ...], name: str) -> bytes:
    """Return the IDX content of a file's bytes, decompressed if they are gzip.

    Decompresses at most one byte more than ``shape`` needs, so a gzip bomb does no harm.
    """
    if raw[:2] != b"\x1f\x8b":
        return raw
    size, stream = _num_bytes(shape), zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = stream.decompress(raw, size + 1)
    except zlib.error as error:
        raise ValueError(f"{name}: damaged gzip ({error}); expected {size} bytes of IDX") from error
    if len(content) > size:
        raise ValueError(f"{name}: the gzip holds more than the {size} bytes expected of {shape}")
    if not stream.eof:
        raise ValueError(f"{name}: truncated gzip of {len(content)} bytes of IDX; expected {size}")
    if stream.unused_data:
        extra = len(stream.unused_data)
        raise ValueError(f"{name}: {extra} bytes of trailing garbage after the gzip stream")
    return content


def decode(content: bytes, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Return the array in an uncompressed IDX file: uint8, a read-only view of ``content``.

    Allocates nothing by the sizes in the file's header.

    >>> decode(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]), (2,), "labels")
    array([5, 7], dtype=uint8)
    """
    header = struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape)
    if len(content) >= 4 and content[:4] != header[:4]:
        magic = f"{content[:4].hex()}; expected {header[:4].hex()}"
        raise ValueError(f"{name}: wrong magic number {magic} ({len(shape)} dimensions of bytes)")
    if len(content) >= len(header) and not content.startswith(header):
        found = struct.unpack(f">{len(shape)}I", content[4 : len(header)])
        raise ValueError(f"{name}: its header has dimensions {found}; expected {tuple(shape)}")
    extra = len(content) - _num_bytes(shape)
    if extra:
        what = f"truncated by {-extra} bytes" if extra < 0 else f"{extra} bytes of trailing garbage"
        sizes = f"{len(content)} bytes of IDX; expected {_num_bytes(shape)}"
        raise ValueError(f"{name}: {what}: {sizes}")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)
