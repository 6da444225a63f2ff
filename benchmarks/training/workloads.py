"""The workloads: sizes, learning rates and initial parameters. Imports NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Sequence

import numpy as np

NUM_CLASSES = 10


class Parameter(NamedTuple):
    """A shape and its initial value; None: normal with variance 1/inputs."""

    shape: tuple[int, ...]
    start: float | None = None


@dataclass(frozen=True)
class Workload:
    """A network, by its trained parameters; each candidate implements it.

    Dense weights are (inputs, outputs), as in the book. ``norms`` are the channels of each batch
    normalisation, in order, which also has a moving mean and variance. ``lr`` is large enough for
    the loss to fall within a few steps, so that a wrong update changes it, and small enough not to
    amplify rounding errors.
    """

    input_shape: tuple[int, ...]
    batch_size: int
    lr: float
    parameters: tuple[Parameter, ...]
    norms: tuple[int, ...] = ()


def conv(inputs: int, outputs: int, kernel: int) -> tuple[Parameter, ...]:
    """Return weight and bias of a square convolution."""
    return Parameter((outputs, inputs, kernel, kernel)), Parameter((outputs,), 0.0)


def norm(channels: int) -> tuple[Parameter, ...]:
    """Return scale and shift of a batch normalisation."""
    return Parameter((channels,), 1.0), Parameter((channels,), 0.0)


def dense(inputs: int, outputs: int) -> tuple[Parameter, ...]:
    """Return weight and bias of a dense layer."""
    return Parameter((inputs, outputs)), Parameter((outputs,), 0.0)


def lenet() -> Workload:
    """Return the book's LeNet, 13.5."""
    layers = (*conv(1, 20, 3), *conv(20, 50, 5), *dense(800, 128), *dense(128, NUM_CLASSES))
    return Workload((1, 28, 28), 256, 0.01, layers)


def mlp(width: int = 2048) -> Workload:
    """Return a perceptron with two wide hidden layers: few operations per parameter."""
    layers = (*dense(784, width), *dense(width, width), *dense(width, NUM_CLASSES))
    return Workload((784,), 128, 0.02, layers)


def resnet18(width: int = 64) -> Workload:
    """Return the book's ResNet-18 for small images, 13.6, without pooling at the beginning."""
    layers, norms, inputs = [*conv(1, width, 3), *norm(width)], [width], width
    for channels, stride in residual_blocks(width):
        layers += [*conv(inputs, channels, 3), *norm(channels)]
        layers += [*conv(channels, channels, 3), *norm(channels)]
        if stride > 1:
            layers += conv(inputs, channels, 1)
        norms += [channels, channels]
        inputs = channels
    layers += dense(inputs, NUM_CLASSES)
    return Workload((1, 28, 28), 64, 0.001, tuple(layers), tuple(norms))


def residual_blocks(width: int) -> list[tuple[int, int]]:
    """Return (channels, stride) of ResNet-18's blocks; those that stride have a 1x1 convolution.

    >>> residual_blocks(64)[:5]
    [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2)]
    """
    return [(width << i // 2, 2 if i in (2, 4, 6) else 1) for i in range(8)]


def channels_last(value: np.ndarray) -> np.ndarray:
    """Return a parameter for NHWC: a kernel as HWIO, and rows in the order of the images' pixels.

    >>> channels_last(np.zeros((50, 20, 5, 5))).shape
    (5, 5, 20, 50)
    """
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    if value.shape == (800, 128):  # LeNet's dense weight behind 50 channels of 16 pixels
        return value.reshape(50, 16, 128).swapaxes(0, 1).reshape(value.shape)
    return value


WORKLOADS = {"lenet": lenet(), "mlp": mlp(), "resnet18": resnet18()}


@dataclass(frozen=True)
class Task:
    """A workload on some devices: the batch, the initial parameters and the learning rate.

    ``moving`` are the mean and the variance that each batch normalisation starts from, in order;
    ``devices`` are pairs such as ``("cpu", 0)``.
    """

    workload: str
    X: np.ndarray
    y: np.ndarray
    params: list[np.ndarray]
    moving: list[np.ndarray]
    lr: float
    devices: Sequence[tuple[str, int]]

    @property
    def width(self) -> int:
        """Outputs of the first layer, which determine the networks' other sizes."""
        return len(self.params[1])


def task(workload: str, batch_size: int, devices: Sequence[tuple[str, int]], seed: int = 0) -> Task:
    """Return the task, which the arguments determine, so that it is the same in every process.

    Images are standard normal, labels uniform.

    >>> made = task("mlp", 4, [("cpu", 0)])
    >>> made.X.shape, made.y.shape, len(made.params), str(made.X.dtype)
    ((4, 784), (4,), 6, 'float32')
    """
    of, rng = WORKLOADS[workload], np.random.default_rng(seed)
    X = rng.standard_normal((batch_size, *of.input_shape), "float32")
    y = rng.integers(NUM_CLASSES, size=batch_size).astype("float32")
    params = [_initial(rng, *parameter) for parameter in of.parameters]
    moving = [np.full(n, start, "float32") for n in of.norms for start in (0, 1)]
    return Task(workload, X, y, params, moving, of.lr, [(kind, i) for kind, i in devices])


def _initial(rng: np.random.Generator, shape: tuple[int, ...], start: float | None) -> np.ndarray:
    if start is not None:
        return np.full(shape, start, "float32")
    inputs = shape[0] if len(shape) == 2 else int(np.prod(shape[1:]))
    return rng.standard_normal(shape, "float32") / np.float32(np.sqrt(inputs))
