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
    """(n, 1, 28, 28) images to (n, 10) scores; ``F`` is ``mx.nd`` or ``mx.sym``, as ``X`` is.

    ``params`` are the trained parameters, layer by layer, then the moving statistics, which MXNet
    itself updates, in place, whenever a normalisation is trained.
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
    """Layers that take their parameters in turn."""

    def __init__(self, F: ModuleType, trained: Iterator[Any], moving: Iterator[Any]) -> None:
        self.F, self.trained, self.moving = F, trained, moving

    def conv(self, h: Any, channels: int, stride: int = 1, kernel: int = 3) -> Any:
        """As large as ``h``, or smaller by the stride."""
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
        """Each channel over the batch; ``fix_gamma`` would keep MXNet's scales at one."""
        scale, shift = next(self.trained), next(self.trained)
        mean, variance = next(self.moving), next(self.moving)
        return self.F.BatchNorm(h, scale, shift, mean, variance, fix_gamma=False, eps=1e-5)

    def relu(self, h: Any) -> Any:
        """As Gluon's layer of that name; the operator ``relu`` would first undo oneDNN's layout."""
        return self.F.Activation(h, act_type="relu")

    def dense(self, h: Any) -> Any:
        """The scores; the weight is (inputs, outputs)."""
        weight, bias = self.F.transpose(next(self.trained)), next(self.trained)
        return self.F.FullyConnected(self.F.flatten(h), weight, bias, num_hidden=NUM_CLASSES)
