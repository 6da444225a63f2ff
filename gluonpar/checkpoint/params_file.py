"""Parameters kept on disk: a file is there whole or not at all."""

from __future__ import annotations

import os
import pathlib
from typing import Callable, Sequence

import mxnet as mx

from gluonpar.checkpoint import files


def prepare(folder: str | os.PathLike) -> pathlib.Path:
    """Make ``folder`` and try that it can be written; ValueError with the reason if not."""
    path = pathlib.Path(folder)
    trial = path / f".writable-{os.getpid()}"
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"nothing can be saved in {path}: MXNet takes names in UTF-8, and this is none"
        ) from error
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
    arrays = {str(i): param for i, param in enumerate(params)}
    _write(path, lambda name: mx.nd.save(name, arrays))


def save_block(path: pathlib.Path, block: mx.gluon.Block) -> None:
    """Write a block's parameters for its ``load_parameters``; otherwise as :func:`save_params`."""
    _write(path, block.save_parameters)


def _write(path: pathlib.Path, save: Callable[[str], None]) -> None:
    with files.replacing(path) as file:
        try:
            save(file.name)
            mx.nd.load(file.name)  # MXNet does not notice a disk that is full when it closes a file
        except mx.MXNetError as error:
            said = str(error).strip().splitlines()[-1]  # what comes before is a traceback in C++
            raise OSError(f"cannot write {path}: {said}") from error
