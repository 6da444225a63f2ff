"""Models as plain functions of their input and a list of parameters."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Sequence

import mxnet as mx
from mxnet import gluon, nd

from gluonpar.models import channels
from gluonpar.runtime import cached_op, private_fields

PIXEL_MEAN, PIXEL_DEVIATION = 72.9, 90.0  # of Fashion-MNIST's training images, about
LENET_SHAPES = ((20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,))


def init_lenet(scale: float = 0.01, ctx: mx.Context | None = None) -> list[nd.NDArray]:
    """Return LeNet's eight parameters, float32: weights normally distributed, biases zero.

    They have the shapes of the book, :data:`LENET_SHAPES`. ``scale`` is the standard deviation.
    MXNet's generator (``mx.random.seed``) draws them on ``ctx`` (default: ``mx.cpu(0)``). Draw
    once and copy with ``get_params``: a second draw, on another context, gives other numbers.
    """
    ctx = ctx or mx.cpu()
    draw = functools.partial(nd.random.normal, scale=scale, ctx=ctx)
    return [draw(shape=s) if len(s) > 1 else nd.zeros(s, ctx=ctx) for s in LENET_SHAPES]


@cached_op.traceable
def lenet(X: nd.NDArray, params: Sequence[nd.NDArray]) -> nd.NDArray:
    """Compute the book's LeNet: (n, 1, 28, 28) float32 images to (n, 10) scores.

    ``params``, of :data:`LENET_SHAPES`, are on the context of X; so are the scores. On CPU contexts
    the convolutions have further channels of zeros (:mod:`gluonpar.models.channels`), which change
    only the rounding. Dive into Deep Learning, 13.5.2, after LeCun et al. 1998.
    """
    F, X = cached_op.operators(X), X.as_nd_ndarray()
    W1, b1, W2, b2, W3, b3, W4, b4 = (param.as_nd_ndarray() for param in params)
    # Activation keeps oneDNN's layout; the operator relu would first convert its input.
    relu = functools.partial(F.Activation, act_type="relu")
    # Further channels, by which convolutions on CPUs take their fast kernels. Their weights are
    # zero, also those of the input's copies.
    n0, n1, n2 = channels.missing(X, 1, 20, 50)
    X = F.broadcast_axis(X, axis=1, size=1 + n0) if n0 else X
    W1, b1 = channels.pad(F, W1, (20, 1, 3, 3), n1, n0), channels.pad(F, b1, (20,), n1)
    W2, b2 = channels.pad(F, W2, (50, 20, 5, 5), n2, n1), channels.pad(F, b2, (50,), n2)
    h1 = relu(F.Convolution(X, W1, b1, kernel=(3, 3), num_filter=20 + n1))
    h1 = F.Pooling(h1, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h2 = relu(F.Convolution(h1, W2, b2, kernel=(5, 5), num_filter=50 + n2))
    h2 = F.Pooling(h2, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h2 = F.slice_axis(h2, axis=1, begin=0, end=50) if n2 else h2
    # FullyConnected takes (outputs, inputs), the book has (inputs, outputs); it is faster than dot.
    h3 = relu(F.FullyConnected(F.flatten(h2), F.transpose(W3), b3, num_hidden=128))
    return F.FullyConnected(h3, F.transpose(W4), b4, num_hidden=10)


class LeNet(gluon.HybridBlock):
    """:func:`lenet` as a Gluon block: ``load_parameters`` reads what scripts/train_lenet.py saves.

    (n, 1, 28, 28) float32 to (n, 10); :func:`standardize` converts pixels. The parameters are named
    '0' to '7', of shapes :data:`LENET_SHAPES`, initialised as by :func:`init_lenet`. A hybridized
    parent's graph, which may run anywhere, and files of graphs have the book's operators.
    """

    def __init__(self, scale: float = 0.01) -> None:
        super().__init__()
        for i, shape in enumerate(LENET_SHAPES):
            init = mx.init.Normal(scale) if len(shape) > 1 else mx.init.Zero()
            setattr(self, str(i), self.params.get(str(i), shape=shape, init=init))

    def forward(self, X: nd.NDArray) -> nd.NDArray:
        """See :func:`lenet`; the graph of a hybridized block is for the device of its first X."""
        with cached_op.tracing_for(X):
            return super().forward(X)

    def export(self, path: str, epoch: int = 0, remove_amp_cast: bool = True) -> None:
        """Write the graph of the book, for any device; else as ``HybridBlock.export``."""
        with private_fields.graph_traced_anew(self):
            super().export(path, epoch, remove_amp_cast)

    def hybrid_forward(self, F: ModuleType, X: nd.NDArray, **params: nd.NDArray) -> nd.NDArray:
        """See :func:`lenet`."""
        return lenet(X, [params[str(i)] for i in range(len(LENET_SHAPES))])


@cached_op.traceable
def standardize(X: nd.NDArray) -> nd.NDArray:
    """Return uint8 images as float32 with mean about 0 and deviation 1, on their own context."""
    pixels = cached_op.operators(X).cast(X.as_nd_ndarray(), dtype="float32")
    return (pixels - PIXEL_MEAN) / PIXEL_DEVIATION
