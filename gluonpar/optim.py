"""Update rules for one device's parameters. The only place that divides by the batch size."""

from __future__ import annotations

from typing import Sequence

from mxnet import nd


def sgd(params: Sequence[nd.NDArray], lr: float, batch_size: int) -> None:
    """Minibatch stochastic gradient descent, in place: ``param -= lr * param.grad / batch_size``.

    ``params`` are one device's, each with a gradient that holds the *sum* over ``batch_size``
    samples. One fused operator updates them all. ``sgd`` in Dive into Deep Learning, 3.4.

    >>> import mxnet as mx
    >>> w = mx.nd.ones((1,)); w.attach_grad(); w.grad[:] = 8
    >>> sgd([w], lr=0.5, batch_size=4)
    >>> w.asscalar()
    0.0
    """
    n = len(params)
    weights_and_grads = [array for param in params for array in (param, param.grad)]
    nd.multi_sgd_update(
        *weights_and_grads,
        out=list(params),
        num_weights=n,
        lrs=[lr] * n,
        wds=[0.0] * n,
        rescale_grad=1.0 / batch_size,
    )
