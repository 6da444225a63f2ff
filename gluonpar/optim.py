"""Stochastic gradient descent: by NumPy on CPU contexts, by MXNet's operator on GPUs."""

from __future__ import annotations

import math
import numbers
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from gluonpar import replicas
from gluonpar.collectives import host
from gluonpar.runtime import memory

# multi_sgd_update and similar operators copy pointers into arrays of this length, and do not check.
MOST_WEIGHTS = 60


def sgd(params: Sequence[nd.NDArray], lr: float, batch_size: float) -> None:
    """Update by minibatch SGD, in place: ``param -= lr * param.grad / batch_size``.

    ``params`` are one device's parameters, of any float dtype. Their gradients hold the *sum* over
    ``batch_size`` samples; parameters without a gradient are left as they are. On a CPU context the
    update is one pass over memory, a quarter of the time of MXNet's own operator; on a GPU it is
    that operator. Nothing waits. Raises ValueError, with nothing changed, unless ``lr`` is finite
    and ``batch_size`` positive and finite. ``sgd`` in Dive into Deep Learning, 3.4.

    >>> import mxnet as mx
    >>> w = mx.nd.ones((1,)); w.attach_grad(); w.grad[:] = 8
    >>> sgd([w], lr=0.5, batch_size=4)
    >>> float(w.asscalar())
    0.0
    """
    if not _is_finite(lr):
        raise ValueError(f"lr must be a finite number, got {lr!r}; try 0.2")
    batch_size = check_batch_size(batch_size)
    params = params if isinstance(params, list) else list(params)
    update_by_sgd(replicas.buckets(replicas.trained([params])), lr, batch_size)


def check_lr(lr: Any, zero: bool = False) -> None:
    """Raise ValueError unless the learning rate is a positive finite number, or 0 if ``zero``."""
    if not _is_finite(lr) or lr < 0 or not (lr or zero):
        must = f"a {'non-negative' if zero else 'positive'} finite number"
        raise ValueError(f"lr must be {must}, got {lr!r}; try 0.2")


def _is_finite(lr: float) -> bool:
    largest = float(np.finfo("float32").max)  # a Python float: no warning of overflow
    return isinstance(lr, (numbers.Real, np.ndarray)) and bool(-largest <= lr <= largest)


def check_batch_size(batch_size: Any, may_overflow: bool = False) -> Any:
    """Return ``batch_size``, which may be fractional or an array of one element, as a number.

    Raises ValueError unless it is positive and finite, or with ``may_overflow`` NaN or infinite.
    """
    if isinstance(batch_size, mx.nd.NDArray) and batch_size.size == 1:
        batch_size = batch_size.asnumpy()
    if isinstance(batch_size, np.ndarray) and batch_size.size == 1:
        batch_size = batch_size.item()
    is_number = isinstance(batch_size, (numbers.Real, np.number))
    if not is_number or not (0 < batch_size < math.inf or may_overflow and not batch_size <= 0):
        raise ValueError(f"batch_size must be a positive finite number, got {batch_size!r}")
    return batch_size


def update_by_sgd(buckets: Sequence[replicas.ParamBucket], lr: float, batch_size: float) -> None:
    """Update the parameters in ``buckets`` as :func:`sgd` does, each copy by its own gradient."""
    update, copies = rule(lr, 1.0 / batch_size), [each for b in buckets for each in b.copies]
    for k in range(len(copies[0].params) if copies else 0):
        if host.on_host([memory.context(copies[0].params[k])]):  # in one operator
            host.update([host.Update([c.grads[k]], [c.params[k]], update) for c in copies])
            continue
        for bucket in buckets:
            pairs = [(each.params[k], each.grads[k]) for each in bucket.copies]
            for start in range(0, len(pairs), MOST_WEIGHTS):
                some = pairs[start : start + MOST_WEIGHTS]
                arrays = [array.as_nd_ndarray() for pair in some for array in pair]
                n = len(some)
                options = {"lrs": [lr] * n, "wds": [0.0] * n, "rescale_grad": 1.0 / batch_size}
                with autograd.pause():
                    nd.multi_sgd_update(*arrays, out=arrays[::2], num_weights=n, **options)


def rule(
    lr: float, rescale_grad: float, wd: float = 0, momentum: float = 0, clip_gradient: float = 0
) -> Callable[..., None]:
    """Return the rule of ``mx.optimizer.SGD``, in place on NumPy blocks (total, param[, momentum]).

    ``total`` is overwritten. ``param -= lr * (clip(rescale_grad * total) + wd * param)``; with
    momentum ``m = momentum * m - lr * (...)``, ``param += m``. As in MXNet, only a positive
    ``clip_gradient`` clips. float32 gets the bits of MXNet's ``multi_sgd_update`` and
    ``multi_sgd_mom_update``: constants are rounded, and terms added, as there.
    """

    def update(total: np.ndarray, param: np.ndarray, state: np.ndarray | None = None) -> None:
        rounded = total.dtype.type
        rate, scale = rounded(lr), rounded(rescale_grad)
        if clip_gradient > 0:
            np.multiply(total, scale, out=total)
            np.clip(total, -clip_gradient, clip_gradient, out=total)
            np.multiply(total, rate, out=total)
        else:
            np.multiply(total, rate * scale, out=total)
        decay = rate * rounded(wd)
        if state is None:
            if wd:
                np.add(total, decay * param, out=total)
            np.subtract(param, total, out=param, casting="same_kind")
            return
        np.multiply(state, momentum, out=state)
        if wd:
            np.subtract(state, decay * param, out=state, casting="same_kind")
        np.subtract(state, total, out=state, casting="same_kind")
        np.add(param, state, out=param)

    return update
