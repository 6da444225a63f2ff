"""ResNet-18 as a plain function, of MXNet's arrays or symbols.

Dive into Deep Learning, 8.6 and 13.6, after He et al., "Deep residual learning for image
recognition", CVPR 2016.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Iterator, Sequence

from benchmarks.training.workloads import NUM_CLASSES, residual_blocks

NUM_MOVING = 2 * (1 + 2 * 8)  # mean and variance: one normalisation, then two in each block


def resnet18(F: ModuleType, X: Any, params: Sequence[Any], width: int = 64) -> Any:
    """Return (n, 10) scores of (n, 1, 28, 28) images; ``F`` is ``mx.nd`` or ``mx.sym``, like ``X``.

    ``params`` are the trained parameters, layer by layer, then the moving statistics, which MXNet
    updates in place in every training step.
    """
    layers = _Layers(F, iter(params[:-NUM_MOVING]), iter(params[-NUM_MOVING:]))
    h = layers.relu(layers.norm(layers.conv(X, width)))
    for channels, stride in residual_blocks(width):
        inside = layers.relu(layers.norm(layers.conv(h, channels, stride)))
        inside = layers.norm(layers.conv(inside, channels))
        if stride > 1:
            h = layers.conv(h, channels, stride, kernel=1)
        h = layers.relu(inside + h)
    return layers.dense(F.Pooling(h, pool_type="avg", kernel=(1, 1), global_pool=True))


class _Layers:
    """Layers that take the next of the parameters."""

    def __init__(self, F: ModuleType, trained: Iterator[Any], moving: Iterator[Any]) -> None:
        self.F, self.trained, self.moving = F, trained, moving

    def conv(self, h: Any, channels: int, stride: int = 1, kernel: int = 3) -> Any:
        """Convolve, with as much padding as keeps the size for a stride of 1."""
        return self.F.Convolution(
            h,
            next(self.trained),
            next(self.trained),
            kernel=(kernel, kernel),
            stride=(stride, stride),
            pad=(kernel // 2, kernel // 2),
            num_filter=channels,
        )

    def norm(self, h: Any) -> Any:
        """Normalise each channel over the batch; ``fix_gamma`` would keep the scales at one."""
        scale, shift = next(self.trained), next(self.trained)
        mean, variance = next(self.moving), next(self.moving)
        return self.F.BatchNorm(h, scale, shift, mean, variance, fix_gamma=False, eps=1e-5)

    def relu(self, h: Any) -> Any:
        """Apply relu as Gluon does; the operator ``relu`` would convert oneDNN's layout first."""
        return self.F.Activation(h, act_type="relu")

    def dense(self, h: Any) -> Any:
        """Return the scores; the weight is (inputs, outputs)."""
        weight, bias = self.F.transpose(next(self.trained)), next(self.trained)
        return self.F.FullyConnected(self.F.flatten(h), weight, bias, num_hidden=NUM_CLASSES)
