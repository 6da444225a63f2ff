"""Channels of zeros, by which MXNet's convolutions on CPUs take their fast kernels.

oneDNN's vector kernels compute 8 channels at once, with AVX-512 also 16, and MXNet 1.9.1 refuses
oneDNN's layouts that pad other numbers (src/operator/nn/mkldnn/mkldnn_convolution.cc of MXNet):
such convolutions are GEMM, and the pooling behind them is, with AVX2, reference code. A network
that pads its weights here, before its operators, computes the same in less time
(docs/performance.md).
"""

from __future__ import annotations

from types import ModuleType
from typing import Mapping, Sequence

import mxnet as mx

from gluonpar.runtime import cached_op

INPUTS = 3  # of a first layer: of fewer, the gradient of its weights is GEMM
MULTIPLE = 8  # of other numbers; 16 is as fast with AVX-512, and slower without


def missing(x: mx.nd.NDArray | mx.sym.Symbol, inputs: int, *channels: int) -> list[int]:
    """Return how many channels to add to a network's ``inputs`` and ``channels``, of input ``x``.

    On a CPU context these are the numbers up to 3 inputs, and up to multiples of 8. On others, and
    for a symbol of which it is not known where it will run, they are zero.

    >>> missing(mx.nd.zeros((1, 1, 28, 28)), 1, 20, 64)
    [2, 4, 0]
    """
    if cached_op.device_type(x) != "cpu":
        return [0] * (1 + len(channels))
    return [max(0, INPUTS - inputs), *(-each % MULTIPLE for each in channels)]


def pad(
    F: ModuleType,
    array: mx.nd.NDArray | mx.sym.Symbol,
    shape: Sequence[int],
    outputs: int,
    inputs: int = 0,
) -> mx.nd.NDArray | mx.sym.Symbol:
    """Return a convolution's weight or bias with zeros for further ``outputs`` and ``inputs``.

    ``array`` of ``shape`` is a weight, (outputs, inputs, kernel ...), or a bias, (outputs,), of
    float32 or float64. F are its operators. The zeros get no gradient. With none, it is ``array``.

    >>> pad(mx.nd, mx.nd.ones((1, 1, 1, 2)), (1, 1, 1, 2), 1, 1).asnumpy().tolist()
    [[[[1.0, 1.0]], [[0.0, 0.0]]], [[[0.0, 0.0]], [[0.0, 0.0]]]]
    """
    if not outputs and not inputs:
        return array
    # The operator pads the last three of five axes. (oneDNN's concat keeps 11 KB a call.)
    axes = F.reshape(array, shape=(1, 1, *(*shape, 1)[:2], -1))
    width = (0, 0, 0, 0, 0, outputs, 0, inputs, 0, 0)  # before and after, for each axis
    axes = F.pad(axes, mode="constant", pad_width=width, constant_value=0)
    more = (outputs, inputs, *[0] * len(shape))
    return F.reshape(axes, shape=tuple(map(int.__add__, shape, more)))


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
        if outputs % MULTIPLE or (inputs > INPUTS and inputs % MULTIPLE)
    }
