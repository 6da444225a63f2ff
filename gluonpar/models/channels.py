"""Channels of zeros, by which MXNet's convolutions on CPUs take their fast kernels.

oneDNN's vector kernels compute 8 channels at once, with AVX-512 also 16, and MXNet 1.9.1 refuses
oneDNN's layouts that pad other numbers (src/operator/nn/mkldnn/mkldnn_convolution.cc of MXNet):
such convolutions are GEMM, and the pooling behind them is, with AVX2, reference code. A network
that pads its arrays here, before its operators, computes the same in less time
(docs/performance.md).
"""

from __future__ import annotations

from types import ModuleType
from typing import Mapping

import mxnet as mx

from gluonpar.install import processors
from gluonpar.runtime import cached_op

INPUTS = 3  # of a first layer: of fewer, the gradient of its weights is GEMM


def missing(x: mx.nd.NDArray | mx.sym.Symbol, inputs: int, *channels: int) -> list[int]:
    """Return how many channels to add to a network's ``inputs`` and ``channels``, of input ``x``.

    On a CPU context these are the numbers up to 3 inputs, and up to multiples of the vector
    registers' length: 16 with AVX-512, else 8. On others, and for a symbol of which it is not known
    where it will run, they are zero.

    >>> missing(mx.nd.zeros((1, 1, 28, 28)), 1, 32, 64)
    [2, 0, 0]
    """
    if cached_op.device_type(x) != "cpu":
        return [0] * (1 + len(channels))
    return [max(0, INPUTS - inputs), *(-each % processors.vector_floats() for each in channels)]


def pad(F: ModuleType, array: mx.nd.NDArray | mx.sym.Symbol, *more: int) -> mx.nd.NDArray:
    """Return ``array`` with ``more[i]`` zeros at the end of axis i; itself if there are none.

    ``array`` has one axis (a bias, one number in ``more``) or four (two numbers). F are its
    operators. The zeros have its dtype and context, and get no gradient.

    >>> pad(mx.nd, mx.nd.ones((2, 1, 1, 1)), 0, 2).reshape((2, -1)).asnumpy().tolist()
    [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    """
    if not any(more):
        return array
    # With oneDNN's concat, which takes four axes, each step kept 11 KB; three axes are MXNet's own.
    padded = F.reshape(array, shape=(0, 0, -1)) if len(more) == 2 else array
    for axis, size in enumerate(more):
        if size:
            zeros = F.zeros_like(F.slice_axis(padded, axis=axis, begin=0, end=1))
            padded = F.concat(padded, F.broadcast_axis(zeros, axis=axis, size=size), dim=axis)
    if len(more) == 1:
        return padded
    return F.reshape_like(padded, array, lhs_begin=2, lhs_end=3, rhs_begin=2, rhs_end=4)


def slow(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return, by name, the channels of convolutions that no vector kernel computes on CPUs.

    ``shapes`` are of parameters; of a convolution's weight (outputs, inputs, kernel ...). Its
    outputs, or more than 3 inputs, are no multiple of 8.

    >>> slow({"a": (16, 6, 5, 5), "b": (32, 3, 3, 3), "c": (10, 84)})
    {'a': '6 to 16 channels'}
    """
    convolutions = {name: shape for name, shape in shapes.items() if len(shape) > 2}
    return {
        name: f"{inputs} to {outputs} channels"
        for name, (outputs, inputs, *_) in convolutions.items()
        if outputs % 8 or (inputs > INPUTS and inputs % 8)
    }
