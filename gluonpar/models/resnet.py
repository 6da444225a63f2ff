"""ResNet-18 of Dive into Deep Learning, as Gluon blocks."""

from __future__ import annotations

from types import ModuleType

from mxnet import nd
from mxnet.gluon import nn


class Residual(nn.HybridBlock):
    """Two 3x3 convolutions with batch normalisation, and a shortcut around them.

    (n, inputs, h, w) to (n, channels, h / stride, w / stride). With a stride above 1 the shortcut
    is a 1x1 convolution. He et al., "Deep residual learning for image recognition", CVPR 2016.
    """

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        first, second = _normed_conv(inputs, channels, stride), _normed_conv(channels, channels, 1)
        self.inside = chain(*first, nn.Activation("relu"), *second)
        self.shortcut = None
        if stride > 1:
            self.shortcut = nn.Conv2D(channels, 1, stride, in_channels=inputs)
        self.relu = nn.Activation("relu")

    def hybrid_forward(self, F: ModuleType, X: nd.NDArray) -> nd.NDArray:
        """Return the relu of the sum of both paths."""
        around = X if self.shortcut is None else self.shortcut(X)
        return self.relu(self.inside(X) + around)


def resnet18(num_classes: int = 10, width: int = 64, inputs: int = 1) -> nn.HybridSequential:
    """Return ResNet-18 for small images: (n, inputs, h, w) float32 to (n, num_classes) scores.

    ``width`` is the first stage's number of channels. No initialisation is deferred. Dive into Deep
    Learning, 13.6.1.
    """
    net = chain(*_normed_conv(inputs, width, 1), nn.Activation("relu"))
    channels = width
    for stage in range(4):  # each after the first halves the image size and doubles the channels
        for block in range(2):
            stride = 2 if stage and not block else 1
            net.add(Residual(channels, width << stage, stride))
            channels = width << stage
    net.add(nn.GlobalAvgPool2D(), nn.Dense(num_classes, in_units=channels))
    return net


def chain(*blocks: nn.HybridBlock) -> nn.HybridSequential:
    """Return the blocks in sequence."""
    net = nn.HybridSequential()
    net.add(*blocks)
    return net


def _normed_conv(inputs: int, channels: int, stride: int) -> list[nn.HybridBlock]:
    conv = nn.Conv2D(channels, 3, stride, padding=1, in_channels=inputs)
    return [conv, nn.BatchNorm(in_channels=channels)]
