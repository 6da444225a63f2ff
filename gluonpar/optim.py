"""Update rules for one device's parameters. The only place that divides by the batch size."""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np
from mxnet import nd

from gluonpar import replicas
from gluonpar.collectives import fused

# multi_sgd_update copies pointers into arrays of this size, and does not check.
_MOST_WEIGHTS = 60


def sgd(params: Sequence[nd.NDArray], lr: float, batch_size: int) -> None:
    """Minibatch stochastic gradient descent, in place: ``param -= lr * param.grad / batch_size``.

    ``params`` are one device's, of any float dtype, with gradients that hold the *sum* over
    ``batch_size`` samples; those without a gradient stay. On a CPU context NumPy does it in one
    pass over the memory (:mod:`gluonpar.collectives.fused`): MXNet's own operator takes four times
    as long there. On a GPU it is that operator. ``sgd`` in Dive into Deep Learning, 3.4.

    >>> import mxnet as mx
    >>> w = mx.nd.ones((1,)); w.attach_grad(); w.grad[:] = 8
    >>> sgd([w], lr=0.5, batch_size=4)
    >>> w.asscalar()
    0.0
    """
    pairs = [(values, grads) for values, grads in replicas.flat(params) if values.size]
    if not pairs:
        return
    if fused.possible(params):
        fused.reduce_update([([grads], [values]) for values, grads in pairs], rule(lr, batch_size))
        return
    for start in range(0, len(pairs), _MOST_WEIGHTS):
        group = pairs[start : start + _MOST_WEIGHTS]
        nd.multi_sgd_update(
            *[array for pair in group for array in pair],
            out=[values for values, _ in group],
            num_weights=len(group),
            lrs=[lr] * len(group),
            wds=[0.0] * len(group),
            rescale_grad=1.0 / batch_size,
        )


def rule(lr: float, batch_size: int) -> Callable[[np.ndarray, np.ndarray], None]:
    """The rule of :func:`sgd` for NumPy blocks (total, param): it overwrites both, in place."""
    rate = lr / batch_size

    def update(total: np.ndarray, param: np.ndarray) -> None:
        np.multiply(total, rate, out=total)
        np.subtract(param, total, out=param, casting="same_kind")

    return update
