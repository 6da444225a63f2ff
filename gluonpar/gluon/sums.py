"""Whether gradients are sums over all devices, by which a program may clip, and update.

Before the sum ``list_grad()`` holds parts, of which none is the gradient of the batch. Sums are
made by a Trainer, or by the program, with :func:`gluonpar.allreduce` or ``allreduce_many``.
"""

from __future__ import annotations

from typing import Iterable, Sequence

import mxnet as mx
from mxnet import gluon

from gluonpar import cluster
from gluonpar.collectives import operations
from gluonpar.gluon import gradients


def _note_sums(lists: Iterable[Sequence[mx.nd.NDArray]]) -> None:
    """Note that a program has summed gradients of parameters over all devices by itself."""
    for param in filter(None, map(gradients.param_of, lists)):
        gradients.tracked[param].is_sum = True


operations.after_sums(_note_sums)


def are_sums(params: Sequence[gluon.Parameter]) -> bool:
    """Return whether some gradients of tracked ``params`` are sums, and all that count."""
    return any(gradients.tracked[param].is_sum for param in params) and not parts(params)


def parts(params: Iterable[gluon.Parameter]) -> list[gluon.Parameter]:
    """Return those of ``params`` whose gradients count, and are no sums over all devices."""
    tracked = [(param, gradients.tracked[param]) for param in params if param in gradients.tracked]
    several = [each for each in tracked if len(each[1].values) * cluster.size() > 1]
    return [param for param, grads in several if any(grads.fresh()) and not grads.is_sum]


def check_summed(params: Iterable[gluon.Parameter]) -> None:
    """Raise ValueError if gradients of ``params`` have been written since they were summed."""
    for param in parts(params):
        raise ValueError(
            f"backward has written the gradient of {param.name} since the last sum over devices; "
            "call allreduce_grads() before update(), or step() instead of both"
        )
