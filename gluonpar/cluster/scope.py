"""Over which devices the public collectives go: all processes', or this process's only."""

from __future__ import annotations

import contextlib
import threading
from typing import Iterator

from gluonpar.cluster.world import size

_thread = threading.local()


@contextlib.contextmanager
def local() -> Iterator[None]:
    """Within this context the calling thread's collectives are over this process's devices.

    Collectives, and functions that call them (:func:`gluonpar.allreduce` and its relatives,
    ``average_gradients``, ``average_statistics``, ``get_params``, ``make_parallel``,
    ``LossMeter.read``), then neither exchange anything with other processes nor wait for them, so
    one rank may call them alone. A ``Towers`` or ``SyncBatchNorm`` that is made inside stays inside
    its process. Other threads, ``gluonpar.Trainer``, ``train_batch``, ``kvstore='gluonpar'`` and
    the functions of :mod:`gluonpar.cluster` are not affected.

    >>> with local():
    ...     num_processes()
    1
    """
    before = is_local()
    _thread.local = True
    try:
        yield
    finally:
        _thread.local = before


def is_local() -> bool:
    """Return whether the calling thread is inside :func:`local`."""
    return getattr(_thread, "local", False)


def num_processes() -> int:
    """Return over how many processes collectives of the calling thread go: all, or this one."""
    return 1 if is_local() else size()
