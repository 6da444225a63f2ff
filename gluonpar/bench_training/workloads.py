"""What is trained: sizes, rates, and the numbers that all candidates start from. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np

NUM_CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A network, by the shapes of its parameters; each candidate writes it in its own words.

    Dense weights are (inputs, outputs), as in the book. ``lr`` lets the loss fall within a few
    steps, so that a wrong update shows in it, but slowly enough not to amplify rounding.
    """

    input_shape: tuple[int, ...]
    batch_size: int
    lr: float
    shapes: tuple[tuple[int, ...], ...]


WORKLOADS = {
    "lenet": Workload(
        (1, 28, 28),
        256,
        0.01,
        ((20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)),
    ),
    "mlp": Workload(
        (784,), 128, 0.02, ((784, 2048), (2048,), (2048, 2048), (2048,), (2048, 10), (10,))
    ),
}


@dataclass(frozen=True)
class Task:
    """One workload on some devices: the batch, the initial parameters and the rate, in NumPy.

    ``devices`` are pairs such as ``("cpu", 0)``.
    """

    workload: str
    X: np.ndarray
    y: np.ndarray
    params: list[np.ndarray]
    lr: float
    devices: Sequence[tuple[str, int]]


def task(workload: str, batch_size: int, devices: Sequence[tuple[str, int]], seed: int = 0) -> Task:
    """The task, the same in every process: all of it follows from the arguments.

    Images are standard normal, labels uniform, weights normal with variance 1/inputs, biases zero.

    >>> made = task("mlp", 4, [("cpu", 0)])
    >>> made.X.shape, made.y.shape, len(made.params), str(made.X.dtype)
    ((4, 784), (4,), 6, 'float32')
    """
    of, rng = WORKLOADS[workload], np.random.default_rng(seed)
    X = rng.standard_normal((batch_size, *of.input_shape), "float32")
    y = rng.integers(NUM_CLASSES, size=batch_size).astype("float32")
    params = [_initial(rng, shape) for shape in of.shapes]
    return Task(workload, X, y, params, of.lr, [(kind, i) for kind, i in devices])


def _initial(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.zeros(shape, "float32")
    inputs = shape[0] if len(shape) == 2 else int(np.prod(shape[1:]))
    return rng.standard_normal(shape, "float32") / np.float32(np.sqrt(inputs))
