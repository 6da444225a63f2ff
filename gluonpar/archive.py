"""A JSON header and arrays in one file: NumPy's ``.npz`` without pickles, safe to read.

A *sealed* archive ends with the SHA-256 of all before it, as the comment that a zip file may have:
``np.load`` opens it all the same, and what was cut short or changed is noticed before it is parsed.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from typing import Any, BinaryIO, Sequence

import numpy as np

_SEAL = b"gluonpar sha256 "
_SEAL_SIZE = len(_SEAL) + 64


def write(file: BinaryIO, header: dict, arrays: Sequence[np.ndarray]) -> None:
    """Write ``header`` (what JSON takes, and NumPy's numbers) and ``arrays`` of any numbers."""
    text = np.frombuffer(json.dumps(header, default=np.number.item).encode(), "uint8")
    np.savez(file, header=text, **{str(i): array for i, array in enumerate(arrays)})


def read(file: BinaryIO) -> tuple[Any, list[np.ndarray]]:
    """The header and the arrays; about any Exception if the file is damaged or something else."""
    with np.load(file, allow_pickle=False) as found:
        header = json.loads(found["header"].tobytes())
        return header, [found[str(i)] for i in range(len(found.files) - 1)]


def sealed(header: dict, arrays: Sequence[np.ndarray]) -> memoryview:
    """The bytes of a sealed archive.

    >>> content = sealed({"a": 1}, [np.arange(3)])
    >>> read(unsealed(content))
    ({'a': 1}, [array([0, 1, 2])])
    """
    buffer = io.BytesIO()
    write(buffer, header, arrays)
    buffer.seek(-2, io.SEEK_END)  # a zip file ends with the length of its comment
    buffer.write(struct.pack("<H", _SEAL_SIZE))
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    buffer.write(_SEAL + digest.encode())
    return buffer.getbuffer()


def unsealed(content: bytes | memoryview) -> BinaryIO:
    """The archive to :func:`read`, its seal checked; ValueError unless that holds."""
    body, seal = content[:-_SEAL_SIZE], bytes(content[-_SEAL_SIZE:])
    if not seal.startswith(_SEAL):
        raise ValueError("it does not end with gluonpar's seal: cut short, or something else")
    found, written = hashlib.sha256(body).hexdigest(), seal[len(_SEAL) :]
    if found.encode() != written:
        raise ValueError(
            f"it is damaged: its SHA-256 is {found[:16]}..., but it was written with "
            f"{written[:16].decode('latin-1')}..."
        )
    return io.BytesIO(content)
