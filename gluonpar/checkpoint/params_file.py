"""Parameters in MXNet's own ``.params`` files, written whole or not at all."""

from __future__ import annotations

import os
from typing import Iterable, Sequence

import mxnet as mx

from gluonpar.checkpoint import files
from gluonpar.runtime import private_fields


def save_params(path: str | os.PathLike, params: mx.gluon.Block | Sequence[mx.nd.NDArray]) -> None:
    """Write a block's parameters for ``load_parameters``, or arrays with the keys '0', '1', ...

    Waits for the arrays. Raises OSError if the file system refuses; ``path`` is then as it was.
    """
    with files.atomic_write(path) as file:
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


def check_initialized(params: Iterable[mx.gluon.Parameter]) -> None:
    """Raise ValueError for the first parameter that has no values to be saved yet."""
    for param in params:
        if private_fields.values(param) is None:
            raise ValueError(
                f"parameter {param.name} has no values yet; initialize the network, and call it on "
                "one batch, in a job on every rank, if its shapes depend on the input"
            )
