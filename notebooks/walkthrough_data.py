"""The images of the walkthrough."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mxnet import nd

from gluonpar.models import lenet
from gluonpar.training.data import dataset

NUM_TEST_IMAGES = 1000


class Data(NamedTuple):
    """A data set: its name, training images of shape (n, height, width), and what a loop takes.

    ``arrays`` are images (n, 1, height, width), standardized, and labels (n,), in float32: those to
    train with, then those to test with.
    """

    name: str
    pictures: np.ndarray
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def load(limit: int | None) -> Data:
    """Return ``limit`` images of Fashion-MNIST; if it is not found, synthetic ones, and say so."""
    try:
        data = dataset.load("fashion-mnist", limit=limit)
    except FileNotFoundError:
        data = dataset.load("synthetic", limit=limit)
        print("Fashion-MNIST was not found here: all images are synthetic, with ten patterns.")
    test = slice(NUM_TEST_IMAGES)
    arrays = (
        *(_standardized(data.train_images), data.train_labels),
        *(_standardized(data.test_images[test]), data.test_labels[test]),
    )
    return Data(data.name, data.train_images[:, 0], arrays)


def _standardized(images: np.ndarray) -> np.ndarray:
    return lenet.standardize(nd.array(images)).asnumpy()
