"""The IDX file format: a four-byte magic number, the dimensions, the bytes.

    00 00 08 03 | 00 00 ea 60 | 00 00 00 1c | 00 00 00 1c | pixels ...
    uint8, 3-d    60000         28            28

The magic number's third byte is the element type (08: unsigned byte, the only one here), its fourth
the number of dimensions; each dimension is a big-endian 32-bit integer. Described on LeCun, Cortes
and Burges's page "The MNIST database of handwritten digits". Files may be gzip-compressed.
"""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np

_UINT8 = 8
_GZIP_MAGIC = b"\x1f\x8b"
# What gzip may add to incompressible bytes: its frame, a name, and five bytes per 16 KiB.
_GZIP_SLACK = 4096


def num_idx_bytes(shape: tuple[int, ...]) -> int:
    """Return the size of an uncompressed IDX file of this shape, in bytes."""
    return 4 + 4 * len(shape) + math.prod(shape)


def max_file_bytes(shape: tuple[int, ...]) -> int:
    """Return the largest size of a file of this shape, compressed or not, in bytes."""
    size = num_idx_bytes(shape)
    return size + size // 1024 + _GZIP_SLACK


def unpack(raw: bytes, shape: tuple[int, ...], name: str) -> bytes:
    """Return the IDX content of a file's bytes, decompressed if they are gzip.

    Decompresses at most one byte more than ``shape`` needs, so a gzip bomb does no harm. Raises
    ValueError, which begins with ``name``, for damaged, truncated or overlong gzip.
    """
    if raw[:2] != _GZIP_MAGIC:
        return raw
    size = num_idx_bytes(shape)
    stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = stream.decompress(raw, size + 1)
    except zlib.error as error:
        raise ValueError(f"{name}: damaged gzip ({error}); expected {size} bytes of IDX") from error
    if len(content) > size:
        raise ValueError(f"{name}: the gzip holds more than the {size} bytes expected of {shape}")
    if not stream.eof:
        raise ValueError(
            f"{name}: truncated gzip: it ends after {len(content)} bytes of IDX; expected {size}"
        )
    if stream.unused_data:
        raise ValueError(
            f"{name}: {len(stream.unused_data)} bytes of trailing garbage after the gzip stream; "
            "expected none"
        )
    return content


def decode(content: bytes, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Return the array in an uncompressed IDX file: uint8, a read-only view of ``content``.

    Raises ValueError, which begins with ``name``, for a wrong magic number, other dimensions than
    ``shape``, and too few or too many bytes. Allocates nothing by the sizes in the header.

    >>> decode(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]), (2,), "labels")
    array([5, 7], dtype=uint8)
    """
    header = 4 + 4 * len(shape)
    magic = bytes([0, 0, _UINT8, len(shape)])
    if len(content) >= 4 and content[:4] != magic:
        raise ValueError(
            f"{name}: wrong magic number {content[:4].hex()}; expected {magic.hex()} "
            f"(unsigned bytes, {len(shape)} dimensions)"
        )
    if len(content) < header:
        raise ValueError(
            f"{name}: truncated: {len(content)} bytes; expected {num_idx_bytes(shape)}"
        )
    found = struct.unpack(f">{len(shape)}I", content[4:header])
    if found != tuple(shape):
        raise ValueError(f"{name}: its header has dimensions {found}; expected {tuple(shape)}")
    extra = len(content) - num_idx_bytes(shape)
    if extra:
        what = f"truncated by {-extra} bytes" if extra < 0 else f"{extra} bytes of trailing garbage"
        raise ValueError(
            f"{name}: {what}: {len(content)} bytes of IDX; expected {num_idx_bytes(shape)}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
