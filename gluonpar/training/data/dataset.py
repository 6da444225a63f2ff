"""The data sets: images and labels in memory, as uint8, and minibatches of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Callable, Iterator

import numpy as np

from gluonpar.training.data import fashion_mnist, locate

NAMES = ("fashion-mnist", "synthetic")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels for classification, in host memory; may be read-only views.

    Images are (n, 1, height, width) uint8, 0 to 255; labels are (n,) uint8, 0 to num_classes - 1.
    `source` says in words where they come from. ValueError: images and labels of different counts.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str
    num_classes: int = 10

    def __post_init__(self) -> None:
        _check_counts(
            self.train_images, self.train_labels, f"{self.name}, training ({self.source})"
        )
        _check_counts(self.test_images, self.test_labels, f"{self.name}, test ({self.source})")

    def limited(self, n: int) -> Dataset:
        """The data set with its first n training images only (views); the test images stay.

        ValueError for fewer than one, or more than there are.
        """
        available = len(self.train_images)
        if not 1 <= n <= available:
            raise ValueError(
                f"limit {n}: {self.name} has {available} training images; "
                f"ask for 1 to {available}, or leave the limit out"
            )
        return replace(self, train_images=self.train_images[:n], train_labels=self.train_labels[:n])


def load(
    name: str = "fashion-mnist",
    data_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    files: fashion_mnist.Files = fashion_mnist.FASHION_MNIST,
) -> Dataset:
    """The data set of this name, with its first `limit` training images if a limit is given.

    "fashion-mnist": 60,000 training and 10,000 test images of clothes, 1 x 28 x 28, in ten classes
    (Xiao et al. 2017); `places.find` says where the files are looked for. "synthetic": see there.

    Args:
        data_dir: the only folder to look in; None looks in the known places, and downloads.
        files: what the files must be; for files of the same layout that are not Fashion-MNIST.

    FileNotFoundError: the files are nowhere. ValueError: an unknown name; a damaged file; a limit
    out of range; a folder for synthetic data.
    """
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}: there are {', '.join(map(repr, NAMES))}")
    if name == "synthetic":
        if data_dir is not None:
            raise ValueError(
                f"data_dir={str(data_dir)!r} for 'synthetic', which is made and not read: "
                "leave the folder out, or ask for 'fashion-mnist'"
            )
        dataset = synthetic()
    else:
        arrays, source = locate.find(data_dir, files)
        dataset = Dataset(
            name,
            arrays[fashion_mnist.TRAIN_IMAGES][:, None],
            arrays[fashion_mnist.TRAIN_LABELS],
            arrays[fashion_mnist.TEST_IMAGES][:, None],
            arrays[fashion_mnist.TEST_LABELS],
            source,
            files.num_classes,
        )
    return dataset if limit is None else dataset.limited(limit)


def synthetic(seed: int = 0, num_train: int = 6000, num_test: int = 1000) -> Dataset:
    """Made-up data of Fashion-MNIST's shapes and dtypes: learnable, and the same for the same seed.

    Each class is a coarse 7 x 7 pattern, enlarged to 28 x 28; a sample is its class's pattern moved
    by up to two pixels, at half contrast, under uniform noise. Classes are equally frequent, up to
    one. Accuracy on it says that training works, and nothing about clothes. ValueError for fewer
    than one training or test image.
    """
    if num_train < 1 or num_test < 1:
        raise ValueError(f"num_train={num_train}, num_test={num_test}: both must be at least 1")
    rng = np.random.RandomState(seed)
    patterns = np.kron(rng.randint(0, 256, size=(10, 7, 7)), np.ones((4, 4), dtype=np.int64))
    train_images, train_labels = _synthesize(patterns, num_train, rng)
    test_images, test_labels = _synthesize(patterns, num_test, rng)
    source = f"synthetic, made with seed {seed}: not real data"
    return Dataset("synthetic", train_images, train_labels, test_images, test_labels, source)


def _synthesize(
    patterns: np.ndarray, count: int, rng: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    # Integers throughout: the same bytes on every machine and with every NumPy.
    num_classes, side, _ = patterns.shape
    labels = rng.permutation(np.arange(count) % num_classes)
    rows, columns = (np.arange(side) + rng.randint(-2, 3, size=(2, count, 1))) % side
    moved = patterns[labels[:, None, None], rows[:, :, None], columns[:, None, :]]
    images = (moved + rng.randint(0, 256, size=moved.shape)) // 2
    return images.astype(np.uint8)[:, None], labels.astype(np.uint8)


def batches(
    images: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    rng: np.random.RandomState | None = None,
    part: Callable[[int], slice] | None = None,
    first: int = 0,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Minibatches (X, y) that hold every sample once; the last may be smaller.

    With an `rng`, which this call advances by one permutation, they are shuffled, and copies.
    Without, they are in order, and views. With ``part``, of a batch of n samples only those in
    ``part(n)`` are yielded, which may be none: what one of several processes takes. The ``first``
    so many batches are left out.

    ValueError: batch_size below 1; different counts.

    >>> [y.tolist() for X, y in batches(np.zeros((5, 1, 2, 2)), np.arange(5), 2)]
    [[0, 1], [2, 3], [4]]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size}: a batch needs at least 1 sample")
    _check_counts(images, labels, "batches")
    starts = range(first * batch_size, len(images), batch_size)
    if rng is None:
        whole = (slice(i, min(i + batch_size, len(images))) for i in starts)
        chosen = (_within(batch, part) for batch in whole)
        return ((images[index], labels[index]) for index in chosen)
    order = rng.permutation(len(images))
    chosen = (order[i : i + batch_size] for i in starts)
    if part is not None:
        chosen = (batch[part(len(batch))] for batch in chosen)
    return ((images[index], labels[index]) for index in chosen)


def _within(batch: slice, part: Callable[[int], slice] | None) -> slice:
    if part is None:
        return batch
    inner = part(batch.stop - batch.start)
    return slice(batch.start + inner.start, batch.start + inner.stop)


def _check_counts(images: np.ndarray, labels: np.ndarray, what: str) -> None:
    if len(images) != len(labels):
        raise ValueError(
            f"{what}: {len(images)} images and {len(labels)} labels; "
            "there must be one label an image: get both from the same source"
        )
