"""Parameters kept on disk: a file is there whole or not at all."""

from __future__ import annotations

import os
import pathlib
from typing import Sequence

import mxnet as mx


def prepare(folder: str | os.PathLike) -> pathlib.Path:
    """Make ``folder`` and try that it can be written; ValueError with the reason if not."""
    path = pathlib.Path(folder)
    trial = path / f".writable-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as error:
        raise ValueError(f"nothing can be saved in {path}: {error.strerror}") from error
    return path


def save_params(path: pathlib.Path, params: Sequence[mx.nd.NDArray]) -> None:
    """Write ``params`` as a ``.params`` file that ``mx.nd.load`` reads; its keys are '0', '1', ...

    Waits for the arrays. Written under a temporary name, flushed to the disk and renamed, so that
    ``path`` never holds half a file. Raises OSError where the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        mx.nd.save(str(temporary), {str(i): param for i, param in enumerate(params)})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except mx.MXNetError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        if temporary.exists():
            temporary.unlink()
