"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import BinaryIO, Iterator


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A binary file to write, which becomes ``path`` at the end, flushed to the disk.

    It has a temporary name in the same folder until then. If writing fails, ``path`` stays what it
    was. Raises OSError where the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(path.parent)
    finally:
        if temporary.exists():
            temporary.unlink()


def _flush_folder(folder: pathlib.Path) -> None:
    """The new name is on the disk too, and outlasts a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
