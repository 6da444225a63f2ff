"""Update rules for one device's parameters. Only the update divides by the batch size."""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np
from mxnet import nd

from gluonpar import replicas
from gluonpar.collectives.host import fused_update

# multi_sgd_update copies pointers into arrays of this length without checking it.
_MOST_WEIGHTS = 60


def sgd(params: Sequence[nd.NDArray], lr: float, batch_size: int) -> None:
    """Update by minibatch SGD, in place: ``param -= lr * param.grad / batch_size``.

    ``params`` are one device's, of any float dtype, whose gradients hold the *sum* over
    ``batch_size`` samples; parameters without a gradient are left as they are. On a CPU context the
    update is one pass over memory in NumPy (:mod:`gluonpar.collectives.host.fused_update`), which
    takes a quarter of the time of MXNet's own operator; on a GPU it is that operator. Nothing
    waits, and nothing is checked: :func:`gluonpar.train_batch` does that. ``sgd`` in Dive into Deep
    Learning, 3.4.

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
        items = [fused_update.Item([p.grad], [p.params], [update] * len(p.params)) for p in trained]
        fused_update.reduce_update(items)
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
    """Return the rule of ``mx.optimizer.SGD``, in place on NumPy blocks (total, param[, momentum]).

    ``total`` is overwritten. ``param -= lr * (clip(rescale_grad * total) + wd * param)``; with
    momentum, as in MXNet, the learning rate is part of the momentum: ``m = momentum * m - lr *
    (...)``, ``param += m``. A ``clip_gradient`` that is None or not positive clips nothing, as in
    MXNet.
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
