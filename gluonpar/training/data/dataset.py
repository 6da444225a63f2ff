"""Data sets in memory, as uint8, and minibatches of them."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator

import numpy as np

from gluonpar.options import DATASETS as NAMES
from gluonpar.training.data import fashion_mnist

NUM_CLASSES = 10


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels for classification, in host memory; they may be read-only views.

    Images are uint8 (n, 1, height, width); labels are uint8 (n,), of ten classes. ``source``
    says where they come from. Raises ValueError if the numbers of images and labels differ, and for
    a label that is no class, for which MXNet would take the nearest class.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            images, labels = getattr(self, f"{part}_images"), getattr(self, f"{part}_labels")
            where = f"{self.name}, {part} ({self.source})"
            _check_counts(images, labels, where)
            for i in np.flatnonzero(~np.isin(labels, np.arange(NUM_CLASSES)))[:1]:
                must = f"labels must be from 0 to {NUM_CLASSES - 1}"
                raise ValueError(f"{where}: {must}, got {labels[i]} at image {i}")

    def checksums(self) -> list[int]:
        """Return the CRC-32 of images and labels, which detects other data, but not tampering."""
        arrays = (self.train_images, self.train_labels, self.test_images, self.test_labels)
        return [zlib.crc32(np.ascontiguousarray(array).data) for array in arrays]

    def hold_out(self, seed: int) -> tuple[Dataset, np.ndarray, np.ndarray]:
        """Return the data set with fewer training images, and the images and labels held out.

        A tenth of the training images, rounded up, is drawn at random by ``seed``; the others keep
        their order. Raises ValueError if there is only one image.
        """
        count = len(self.train_labels)
        if count < 2:
            raise ValueError("early_stop needs at least 2 training images, to hold one out, got 1")
        held_out = np.zeros(count, bool)
        held_out[np.random.RandomState(seed).permutation(count)[: -(-count // 10)]] = True
        images, labels = self.train_images, self.train_labels
        rest = replace(self, train_images=images[~held_out], train_labels=labels[~held_out])
        return rest, images[held_out], labels[held_out]


def load(
    name: str = "fashion-mnist",
    data_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> Dataset:
    """Return the data set ``name``: with ``limit``, its first training and first test images.

    "fashion-mnist" has 60,000 training and 10,000 test images of clothes, 1 x 28 x 28, in ten
    classes (Xiao et al. 2017); "synthetic" is :func:`synthetic`. The files are looked for in
    ``data_dir`` only, or, without it, in the known folders; if none has them, they are downloaded.

    Raises FileNotFoundError if the files are not found; ValueError for an unknown name, a damaged
    file, a limit that is out of range, and ``data_dir`` with synthetic data.
    """
    if name not in NAMES:
        raise ValueError(f"the data set must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "synthetic":
        if data_dir is not None:
            raise ValueError(f"synthetic data have no files: leave out data_dir={str(data_dir)!r}")
        dataset = synthetic()
    else:
        (X, y, test_X, test_y), source = fashion_mnist.find(data_dir)
        dataset = Dataset(name, X[:, None], y, test_X[:, None], test_y, source)
    count, kept = len(dataset.train_labels), dict(vars(dataset))
    if limit is not None and not 1 <= limit <= count:
        raise ValueError(f"limit must be from 1 to {count}, the training images, got {limit}")
    kept.update({key: each[:limit] for key, each in kept.items() if isinstance(each, np.ndarray)})
    return Dataset(**kept)


def synthetic(seed: int = 0, num_train: int = 6000, num_test: int = 1000) -> Dataset:
    """Return made-up data with Fashion-MNIST's shapes and dtypes; a seed always gives the same.

    A sample is its class's 7 x 7 pattern, enlarged to 28 x 28 and shifted by up to two pixels, at
    half contrast, with uniform noise. Class sizes differ by at most one. Accuracy on these data
    shows only that training works.
    """
    rng = np.random.RandomState(seed)
    # Integers throughout: the same bytes on every machine and with every NumPy.
    patterns = np.kron(rng.randint(0, 256, size=(NUM_CLASSES, 7, 7)), np.ones((4, 4), int))
    arrays: list[np.ndarray] = []
    for count in (num_train, num_test):
        labels = rng.permutation(np.arange(count) % NUM_CLASSES)
        rows, columns = (np.arange(28) + rng.randint(-2, 3, size=(2, count, 1))) % 28
        shifted = patterns[labels[:, None, None], rows[:, :, None], columns[:, None, :]]
        images = (shifted + rng.randint(0, 256, size=shifted.shape)) // 2
        arrays += [images[:, None].astype(np.uint8), labels.astype(np.uint8)]
    X, y, test_X, test_y = arrays
    source = f"synthetic, made with seed {seed}: not real data"
    return Dataset("synthetic", X, y, test_X, test_y, source)


def batches(
    images: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    rng: np.random.RandomState | None = None,
    share: Callable[[int], slice] | None = None,
    first: int = 0,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield minibatches (X, y) that contain every sample once; the last may be smaller.

    With ``rng``, which this call advances by one permutation, samples are shuffled and copied;
    without it, X and y are views. ``share`` maps a batch's size to the slice that is yielded, this
    process's share, which may be empty. The first ``first`` batches are skipped. Raises ValueError
    for a batch_size below 1, and if the numbers of images and labels differ.

    >>> [y.tolist() for X, y in batches(np.zeros((5, 1, 2, 2)), np.arange(5), 2)]
    [[0, 1], [2, 3], [4]]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    _check_counts(images, labels, "batches")
    order = None if rng is None else rng.permutation(len(images))

    def generate() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(first * batch_size, len(images), batch_size):
            size = min(batch_size, len(images) - start)
            taken = slice(0, size) if share is None else share(size)
            index: Any = slice(start + taken.start, start + taken.stop)
            if order is not None:
                index = order[index]
            yield images[index], labels[index]

    return generate()


def _check_counts(images: np.ndarray, labels: np.ndarray, name: str) -> None:
    if len(images) != len(labels):
        counts = f"{len(images)} and {len(labels)}"
        raise ValueError(f"{name}: there must be as many images as labels, got {counts}")
