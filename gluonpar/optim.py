"""Update rules for one device's parameters. The only place that divides by the batch size."""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np
from mxnet import nd

from gluonpar import replicas
from gluonpar.collectives.host import fused_update

# multi_sgd_update copies pointers into arrays of this size, and does not check.
_MOST_WEIGHTS = 60


def sgd(params: Sequence[nd.NDArray], lr: float, batch_size: int) -> None:
    """Minibatch stochastic gradient descent, in place: ``param -= lr * param.grad / batch_size``.

    ``params`` are one device's, of any float dtype, with gradients that hold the *sum* over
    ``batch_size`` samples; those without a gradient stay. On a CPU context NumPy does it in one
    pass over the memory (:mod:`gluonpar.collectives.host.fused_update`): MXNet's own operator takes four times
    as long there. On a GPU it is that operator. Nothing waits, and nothing is checked:
    :func:`gluonpar.train_batch` does that. ``sgd`` in Dive into Deep Learning, 3.4.

    >>> import mxnet as mx
    >>> w = mx.nd.ones((1,)); w.attach_grad(); w.grad[:] = 8
    >>> sgd([w], lr=0.5, batch_size=4)
    >>> w.asscalar()
    0.0
    """
    trained = [part for part in replicas.parts(params) if part.grad.size]
    if not trained:
        return
    if fused_update.possible(params):
        update = rule(lr, 1.0 / batch_size)
        fused_update.reduce_update(
            [fused_update.Item([p.grad], [p.params], [update] * len(p.params)) for p in trained]
        )
        return
    params = [param for part in trained for param in part.params]
    for start in range(0, len(params), _MOST_WEIGHTS):
        group = params[start : start + _MOST_WEIGHTS]
        nd.multi_sgd_update(
            *[array for param in group for array in (param, param.grad)],
            out=group,
            num_weights=len(group),
            lrs=[lr] * len(group),
            wds=[0.0] * len(group),
            rescale_grad=1.0 / batch_size,
        )


def rule(
    lr: float,
    rescale_grad: float,
    wd: float = 0.0,
    momentum: float = 0.0,
    clip_gradient: float | None = None,
) -> Callable[..., None]:
    """The rule of ``mx.optimizer.SGD`` for NumPy blocks (total, param[, momentum]), in place.

    ``total`` is overwritten. ``param -= lr * (clip(rescale_grad * total) + wd * param)``; with
    momentum, as MXNet has it, the rate is in the momentum: ``m = momentum * m - lr * (...)``,
    ``param += m``. A ``clip_gradient`` of None, 0 or less clips nothing, as there.
    """

    def update(total: np.ndarray, param: np.ndarray, state: np.ndarray | None = None) -> None:
        if not clip_gradient or clip_gradient < 0:
            np.multiply(total, lr * rescale_grad, out=total)
        else:
            np.multiply(total, rescale_grad, out=total)
            np.clip(total, -clip_gradient, clip_gradient, out=total)
            np.multiply(total, lr, out=total)
        if wd:
            np.add(total, (lr * wd) * param, out=total)
        if state is None:
            np.subtract(param, total, out=param, casting="same_kind")
            return
        np.multiply(state, momentum, out=state)
        np.subtract(state, total, out=state, casting="same_kind")
        np.add(param, state, out=param)

    return update
