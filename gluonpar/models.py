"""Models as plain functions of their input and a list of parameters."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet import nd

PIXEL_MEAN, PIXEL_DEVIATION = 72.9, 90.0

LENET_SHAPES = ((20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,))


def init_lenet(scale: float = 0.01, ctx: mx.Context | None = None) -> list[nd.NDArray]:
    """LeNet's eight parameters, float32: weights from a normal distribution, biases zero.

    Shapes as in the book: :data:`LENET_SHAPES`, weight before bias, layer by layer. ``scale`` is
    the standard deviation. They are drawn on ``ctx`` (default: CPU 0) from MXNet's generator:
    ``mx.random.seed`` makes them repeat. Draw once, then copy with ``get_params``: the same seed
    differs between contexts.
    """
    ctx = ctx or mx.cpu()
    return [
        nd.random.normal(scale=scale, shape=shape, ctx=ctx)
        if len(shape) > 1
        else nd.zeros(shape, ctx=ctx)
        for shape in LENET_SHAPES
    ]


def lenet(X: nd.NDArray, params: Sequence[nd.NDArray]) -> nd.NDArray:
    """The book's LeNet: (n, 1, 28, 28) float32 images to (n, 10) scores, on the context of both.

    Two convolutions, each followed by relu and average pooling, then two dense layers. ``params``
    are those of :func:`init_lenet`, on X's context. Dive into Deep Learning, 13.5.2, after LeCun et
    al. 1998.
    """
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1 = nd.relu(nd.Convolution(X, W1, b1, kernel=(3, 3), num_filter=20))
    h1 = nd.Pooling(h1, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h2 = nd.relu(nd.Convolution(h1, W2, b2, kernel=(5, 5), num_filter=50))
    h2 = nd.Pooling(h2, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h3 = nd.relu(_dense(nd.flatten(h2), W3, b3))
    return _dense(h3, W4, b4)


def _dense(x: nd.NDArray, W: nd.NDArray, b: nd.NDArray) -> nd.NDArray:
    """``x W + b`` with the book's W of shape (inputs, outputs); faster than nd.dot on the CPU."""
    return nd.FullyConnected(x, nd.transpose(W), b, num_hidden=W.shape[1])


def standardize(X: nd.NDArray) -> nd.NDArray:
    """uint8 images as float32 with about mean 0 and deviation 1, made on the device they are on.

    The two constants are those of Fashion-MNIST's training pixels. Float images pass unchanged.
    """
    if X.dtype != np.uint8:
        return X
    return (X.astype("float32") - PIXEL_MEAN) / PIXEL_DEVIATION
