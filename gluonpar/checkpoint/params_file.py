"""Parameters in MXNet's own ``.params`` files, written whole or not at all."""

from __future__ import annotations

import pathlib
from typing import Callable, Iterable, Sequence

import mxnet as mx

from gluonpar.checkpoint import files


def save_params(path: pathlib.Path, params: Sequence[mx.nd.NDArray]) -> None:
    """Write ``params`` to a file that ``mx.nd.load`` reads, with the keys '0', '1', ...

    Waits for the arrays. Raises OSError if the file system refuses; ``path`` is then as it was.
    """
    arrays = {str(i): param for i, param in enumerate(params)}
    _write(path, lambda name: mx.nd.save(name, arrays))


def save_block(path: pathlib.Path, block: mx.gluon.Block) -> None:
    """Write a block's parameters for its ``load_parameters``; otherwise as :func:`save_params`."""
    _write(path, block.save_parameters)


def check_initialized(params: Iterable[mx.gluon.Parameter]) -> None:
    """Raise ValueError for the first parameter that has no values to be saved yet."""
    for param in params:
        if param._data is None:
            raise ValueError(
                f"parameter {param.name} has no values yet; initialize the network, and call it on "
                "one batch if its shapes depend on the input"
            )


def _write(path: pathlib.Path, save: Callable[[str], None]) -> None:
    with files.atomic_write(path) as file:
        try:
            save(file.name)
            # MXNet does not notice that closing the file failed, as on a full disk.
            mx.nd.load(file.name)  # noqa: TID251
        except mx.MXNetError as error:
            reason = str(error).strip().splitlines()[-1]  # after a stack trace of C++ functions
            raise OSError(f"cannot write {path}: {reason}") from error
