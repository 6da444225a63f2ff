"""A JSON header and arrays in one NumPy ``.npz`` file, which ends with its own SHA-256.

The members are ``header.npy`` (the bytes of the JSON text), ``0.npy``, ``1.npy``, ...; the SHA-256
of everything before it is the comment of the zip file, which ``np.load`` opens too. It is verified
before anything is parsed, but it is not a signature: anyone can write a file with a correct one.
Loading such a file executes no code, because nothing is unpickled, and takes no more memory than
its size: members must not be compressed, and NumPy reads at most their bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import zipfile
from typing import Any, Callable, Sequence

import numpy as np

from gluonpar.checkpoint import files

_SEAL = b"gluonpar sha256 "
_SEAL_SIZE = len(_SEAL) + 64


def write(path: str | os.PathLike, header: Any, arrays: Sequence[np.ndarray]) -> None:
    """Write a sealed file whole or not at all; OSError if the file system refuses."""
    with files.atomic_write(path) as file:
        file.write(pack(header, arrays))


def pack(header: Any, arrays: Sequence[np.ndarray]) -> memoryview:
    """Return the content of a sealed file.

    ``header`` is for JSON and may hold NumPy's numbers; ``arrays`` are of any dtype but object.

    >>> unpack(pack({"a": 1}, [np.arange(3)]))
    ({'a': 1}, [array([0, 1, 2])])
    """
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(header, default=np.number.item).encode(), "uint8")
    members = {str(i): np.asarray(array, order="C") for i, array in enumerate(arrays)}
    np.savez(buffer, header=text, **members)
    seal(buffer)
    return buffer.getbuffer()


def seal(buffer: io.BytesIO) -> None:
    """Write the SHA-256 of a zip file that has no comment into its comment."""
    buffer.seek(-2, io.SEEK_END)  # a zip file ends with the length of its comment
    buffer.write(struct.pack("<H", _SEAL_SIZE))
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    buffer.write(_SEAL + digest.encode())


def unpack(
    content: bytes | memoryview,
    parse: Callable[[Any, dict[int, np.ndarray]], Any] | None = None,
    path: str | os.PathLike = "the file",
) -> Any:
    """Return header and arrays of a sealed file, or ``parse(header, arrays by number)``.

    If ``parse`` takes out each array once, a small file cannot make it use much memory. Raises
    ValueError, with ``path`` and the reason, if the content is not a sealed file or was changed, or
    if ``parse`` raises any exception, as it may on a file made by hand.
    """
    try:
        body, seal = memoryview(content)[:-_SEAL_SIZE], bytes(content[-_SEAL_SIZE:])
        if not seal.startswith(_SEAL):
            raise ValueError("it does not end with a SHA-256: it is truncated or of another kind")
        if seal != _SEAL + hashlib.sha256(body).hexdigest().encode():
            raise ValueError("it is damaged: it does not have the SHA-256 that it ends with")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:  # noqa: TID251
            members = file.zip.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("its members are compressed, which gluonpar never does")
            total, most = sum(member.file_size for member in members), len(content)
            if total > most:
                raise ValueError(f"its members have {total} bytes in all, but the file has {most}")
            arrays = [file[str(i)] for i in range(len(file.files) - 1)]
            header = json.loads(file["header"].tobytes())
        if not all(isinstance(array, np.ndarray) for array in arrays):
            raise ValueError("not all of its members are arrays")
        return parse(header, dict(enumerate(arrays))) if parse else (header, arrays)
    except Exception as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} cannot be loaded: {reason}") from error
