"""Files that are there whole or not at all, and what is in them."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from typing import BinaryIO, Iterator


class Unreadable(ValueError):
    """There is no such file, or it cannot be read; the message names it and says why."""


def content(path: pathlib.Path, what: str = "file") -> bytes:
    """All bytes of ``path``, which is a ``what`` in the words of Unreadable, if it is not there."""
    try:
        if not path.is_file():
            raise Unreadable(f"there is no {what} {path}")
        return path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from error


def check_writable(path: str | os.PathLike) -> None:
    """Raise OSError unless a file can be written at ``path``; what is there stays as it is."""
    was_there = os.path.lexists(path)
    # A pipe that nobody reads is an error here; otherwise it would be a wait without end.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
    os.close(handle)
    if not was_there:
        os.unlink(path)


def check_replaceable(path: str | os.PathLike) -> None:
    """Raise OSError unless :func:`replacing` can write ``path``: no folder, device or pipe."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is there, and no file")
    check_writable(_temporary(pathlib.Path(path)))


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A binary file to write, which becomes ``path`` at the end, flushed to the disk.

    It has a temporary name in the same folder until then. If writing fails, ``path`` stays what it
    was. Raises OSError where the disk refuses.
    """
    temporary = _temporary(path)
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


def _temporary(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _flush_folder(folder: pathlib.Path) -> None:
    """The new name is on the disk too, and outlasts a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
