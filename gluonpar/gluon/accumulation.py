"""Passes that add to gradients: with ``no_sync``, or with ``grad_req='add'``.

For ``no_sync``, MXNet's ``grad_req='add'`` is not used: the backward of some operators writes all
the same, and that of others to memory that is not theirs (MXNet 1.9.1: mean, clip, cumsum,
linalg.det, ...). Where the gradients are sums over devices, passes add to one of them.
"""

from __future__ import annotations

from typing import Iterable

import mxnet as mx
from mxnet import autograd, gluon

from gluonpar.gluon import gradients
from gluonpar.gluon.gradients import Gradients
from gluonpar.runtime import memory


def accumulate(params: Iterable[gluon.Parameter]) -> None:
    """Until they are used, have each pass add to the gradients of ``params`` that count."""
    for param in params:
        gradients.of(param).accumulates = True


def prepare(grads: Gradients, i: int) -> mx.nd.NDArray | None:
    """Before a pass that adds on device ``i``: return a copy of what it would overwrite."""
    with autograd.pause():
        if grads.sum_on is not None:
            memory.zero([grad for j, grad in enumerate(grads.grads) if j not in grads.sum_on])
            grads.sum_on = None
        overwrites = not grads.adds_always and any(memory.grad_flags([grads.values[i]]))
        return grads.grads[i].copy() if overwrites else None


def add(grads: Gradients, i: int, before: mx.nd.NDArray | None) -> None:
    """After the pass, add what :func:`prepare` has returned."""
    if before is not None:
        with autograd.pause():
            grads.grads[i] += before
