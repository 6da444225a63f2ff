"""Reading files, and writing them so that a path never holds a partial file.

Parameters are in MXNet's own ``.params`` files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from typing import BinaryIO, Iterator, Sequence

import mxnet as mx


def read(path: str | os.PathLike) -> bytes:
    """Return the content of a regular file. Raises ValueError if it cannot be read."""
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def loading(path: str | os.PathLike) -> Iterator[None]:
    """Raise any exception of the block as a ValueError that names ``path`` and the reason."""
    try:
        yield
    except Exception as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} cannot be loaded: {reason}") from error


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Open a binary file for writing that becomes ``path`` if the block raises no exception.

    In the block it has a temporary name in the same folder; then it is flushed to the disk and
    renamed. If anything fails, ``path`` stays as it was. Raises OSError if the file system refuses,
    and if ``path`` is a folder, device or pipe.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it exists and is not a regular file", str(path))
    # A new name, because other threads, and processes on other hosts, may write the same path.
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_replaceable(path: str | os.PathLike) -> None:
    """Raise OSError if :func:`atomic_write` cannot write ``path``."""
    with contextlib.suppress(EOFError), atomic_write(path):
        raise EOFError  # then atomic_write leaves path as it is


def make_writable_folder(folder: str | os.PathLike) -> pathlib.Path:
    """Create ``folder`` if necessary. Raises ValueError if no file can be written into it."""
    path = pathlib.Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        check_replaceable(path / "any")
    except OSError as error:
        raise ValueError(f"nothing can be saved in {path}: {error.strerror}") from error
    return path


def save_params(path: str | os.PathLike, params: mx.gluon.Block | Sequence[mx.nd.NDArray]) -> None:
    """Write a block's parameters for ``load_parameters``, or arrays with the keys '0', '1', ...

    Waits for the arrays. Raises OSError if the file system refuses; ``path`` is then as it was.
    """
    with atomic_write(path) as file:
        try:
            if isinstance(params, mx.gluon.Block):
                params.save_parameters(file.name)
            else:
                # With its context a file from gpu(3) could not be read where there are fewer GPUs.
                copies = [param.as_in_context(mx.cpu()) for param in params]
                mx.nd.save(file.name, {str(i): param for i, param in enumerate(copies)})
            # MXNet does not notice that closing the file failed, as on a full disk.
            mx.nd.load(file.name)  # noqa: TID251
        except mx.MXNetError as error:
            reason = str(error).strip().splitlines()[-1]  # after a stack trace of C++ functions
            raise OSError(f"cannot write {path}: {reason}") from error
