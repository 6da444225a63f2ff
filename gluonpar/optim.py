"""Update rules for one device's parameters. The only place that divides by the batch size."""

from __future__ import annotations

from typing import Sequence

from mxnet import nd

# multi_sgd_update copies pointers into arrays of this size, and does not check.
_MOST_WEIGHTS = 60


def sgd(params: Sequence[nd.NDArray], lr: float, batch_size: int) -> None:
    """Minibatch stochastic gradient descent, in place: ``param -= lr * param.grad / batch_size``.

    ``params`` are one device's, of one dtype, each with a gradient that holds the *sum* over
    ``batch_size`` samples. One fused operator updates up to 60 of them. ``sgd`` in Dive into Deep
    Learning, 3.4.

    >>> import mxnet as mx
    >>> w = mx.nd.ones((1,)); w.attach_grad(); w.grad[:] = 8
    >>> sgd([w], lr=0.5, batch_size=4)
    >>> w.asscalar()
    0.0
    """
    for start in range(0, len(params), _MOST_WEIGHTS):
        group = list(params[start : start + _MOST_WEIGHTS])
        nd.multi_sgd_update(
            *[array for param in group for array in (param, param.grad)],
            out=group,
            num_weights=len(group),
            lrs=[lr] * len(group),
            wds=[0.0] * len(group),
            rescale_grad=1.0 / batch_size,
        )
