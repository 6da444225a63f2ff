"""Results that repeat bit for bit on GPUs: only cuDNN's deterministic algorithms are used.

By default MXNet times cuDNN's algorithms and takes the fastest for each shape of a convolution, and
some of them add gradients with atomic operations, in another order each time; so does the backward
of max pooling. CPU contexts need nothing.
"""

from __future__ import annotations

import contextlib
import os
from typing import Iterator

import mxnet as mx

SETTINGS = {"MXNET_ENFORCE_DETERMINISM": "1", "MXNET_CUDNN_AUTOTUNE_DEFAULT": "0"}


@contextlib.contextmanager
def enforced() -> Iterator[None]:
    """Set :data:`SETTINGS` in the environment, whatever it has, and restore it at the end.

    MXNet reads them when a convolution of a new shape is first computed, and keeps its algorithms
    until the process ends: shapes that were computed before are not affected. Waits at the start.
    """
    mx.nd.waitall()  # setenv may move the environment while an operator reads it
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
