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
    """Note that a program has summed gradients over all devices: the next sum adds each again."""
    for param in filter(None, map(gradients.param_of, lists)):
        grads = gradients.tracked[param]
        grads.sum_on = range(len(grads.values))


operations.after_sums(_note_sums)


def are_sums(params: Sequence[gluon.Parameter]) -> bool:
    """Return whether some gradients of tracked ``params`` are sums, and all that count."""
    of_params = [gradients.tracked[param] for param in params]
    parts = [grads for grads in of_params if grads.sum_on is None]
    return len(parts) < len(params) and not any(any(grads.fresh()) for grads in parts)


def check_summed(params: Iterable[gluon.Parameter]) -> None:
    """Raise ValueError if gradients of ``params`` have been written since they were summed."""
    for param in filter(gradients.tracked.__contains__, params):
        grads = gradients.tracked[param]
        is_sum = len(grads.values) * cluster.size() == 1 or grads.sum_on is not None
        if not is_sum and any(grads.fresh()):
            raise ValueError(
                f"backward has written the gradient of {param.name} since the last sum over "
                "devices; call allreduce_grads() before update(), or step() instead of both"
            )
