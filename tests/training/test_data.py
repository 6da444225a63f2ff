"""Data sets and minibatches."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gluonpar.training.data.dataset import Dataset, batches, load, synthetic
from gluonpar.training.data.fashion_mnist import folders, missing
from tests.support.idx_files import contents, encode, write


def arrays_of(dataset: Dataset) -> list[np.ndarray]:
    return [getattr(dataset, f"{a}_{b}") for a in ("train", "test") for b in ("images", "labels")]


def test_load_gives_the_files_contents_with_a_channel_axis(tmp_path):
    folder = write(tmp_path / "data", contents())
    dataset = load(data_dir=folder)
    assert dataset.name == "fashion-mnist"
    assert dataset.source == f"{folder} (data_dir)"
    assert [a.shape for a in arrays_of(dataset)] == [(6, 1, 28, 28), (6,), (4, 1, 28, 28), (4,)]
    for content, array in zip(contents().values(), arrays_of(dataset)):
        assert array.dtype == np.uint8
        assert encode(array[:, 0] if array.ndim == 4 else array) == content


def of_three(batch_size, num_labels=3):
    return batches(np.zeros((3, 1)), np.zeros(num_labels), batch_size)


def of_counts(*counts):
    return Dataset("x", *(np.zeros(count) for count in counts), "here")


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (load, ["mnist"], "fashion-mnist, synthetic, got 'mnist'"),
        (load, ["synthetic", "somewhere"], "data_dir='somewhere'"),
        *((load, ["synthetic", None, n], f"limit .* 6000.*got {n}") for n in (0, -3, 6001)),
        *((of_three, [n], f"batch_size .*at least 1, got {n}") for n in (0, -2)),
        (of_three, [2, 4], "3 and 4"),
        (of_counts, [3, 2, 2, 2], r"x, train \(here\): .* 3 and 2"),
        (of_counts, [3, 3, 2, 3], r"x, test \(here\): .* 2 and 3"),
    ],
)
def test_values_that_are_not_allowed_are_named(function, arguments, words):
    with pytest.raises(ValueError, match=words):
        function(*arguments)


def test_limit_keeps_the_first_training_and_test_images():
    whole, part = synthetic(), load("synthetic", limit=17)
    for all_, first in zip(arrays_of(whole), arrays_of(part)):
        np.testing.assert_array_equal(first, all_[:17])
    assert part.source == whole.source
    most = load("synthetic", limit=6000)
    assert (len(most.train_labels), len(most.test_labels)) == (6000, 1000)


@pytest.mark.parametrize("count", [2, 10, 11, 95])
def test_a_seed_always_holds_out_the_same_tenth_and_the_rest_keeps_its_order(count):
    whole = load("synthetic", limit=count)
    marks = np.arange(count, dtype=np.uint8)
    whole.train_images[:, 0, 0, 0] = marks  # tells them apart
    rest, images, labels = whole.hold_out(3)
    held_out, kept = images[:, 0, 0, 0], rest.train_images[:, 0, 0, 0]
    assert len(held_out) == len(labels) == -(-count // 10)
    assert sorted([*held_out, *kept]) == marks.tolist() and sorted(kept) == kept.tolist()
    assert labels.tolist() == whole.train_labels[held_out].tolist()
    assert rest.train_labels.tolist() == whole.train_labels[kept].tolist()
    assert rest.test_images is whole.test_images
    assert whole.hold_out(3)[1].tobytes() == images.tobytes()
    if count > 11:
        assert whole.hold_out(4)[1].tobytes() != images.tobytes()


@pytest.mark.parametrize("bad", [77, -3, float("nan"), 10, 1.5])
@pytest.mark.parametrize("part", ["train", "test"])
def test_a_label_that_is_no_class_is_refused_with_its_place(bad, part):
    images, labels = np.zeros((3, 1, 2, 2), np.uint8), {"train": np.zeros(3), "test": np.zeros(3)}
    labels[part][1] = bad
    with pytest.raises(ValueError, match=rf"{part} .*from 0 to 9, got {bad:g}(\.0)? at image 1"):
        Dataset("x", images, labels["train"], images, labels["test"], "here")


def test_synthetic_data_are_the_same_everywhere():
    digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays_of(synthetic()))).hexdigest()
    assert digest == "1c705508fab8d31604da0091ac2788cdc9e12a4271666dafddf3808907191de6"
    assert not np.array_equal(synthetic(1).train_images, synthetic().train_images)


@given(st.integers(0, 40), st.integers(1, 50), st.booleans(), st.booleans(), st.integers(0, 3))
def test_batches_hold_every_sample_once_with_its_label(count, batch_size, shuffled, halved, first):
    """Also where each of two processes takes half of each batch, and from batch ``first`` on."""
    labels = np.arange(count)
    images = (labels * 7 + 3).reshape(count, 1, 1, 1)
    shares = [lambda n: slice(0, n // 2), lambda n: slice(n // 2, n)] if halved else [None]
    rngs = [np.random.RandomState(count) if shuffled else None for _ in shares]
    parts = [
        list(batches(images, labels, batch_size, rng, share, first))
        for rng, share in zip(rngs, shares)
    ]
    whole = [tuple(map(np.concatenate, zip(*of_shares))) for of_shares in zip(*parts)]
    for X, y in whole:
        np.testing.assert_array_equal(X[:, 0, 0, 0], y * 7 + 3)
    sizes = [len(y) for _, y in whole]
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert all(1 <= size <= batch_size for size in sizes)
    expected = np.random.RandomState(count).permutation(count) if shuffled else labels
    order = [int(label) for _, y in whole for label in y]
    assert order == expected[first * batch_size :].tolist()


def test_the_real_data_where_they_are():
    places = folders()
    here = [folder for folder in places if not missing(folder)]
    if not here:
        pytest.skip("Fashion-MNIST is in none of " + ", ".join(map(str, places)))
    dataset = load(data_dir=here[0])
    assert dataset.train_images.shape == (60000, 1, 28, 28)
    assert dataset.test_images.shape == (10000, 1, 28, 28)
    assert np.bincount(dataset.train_labels).tolist() == [6000] * 10
    assert np.bincount(dataset.test_labels).tolist() == [1000] * 10
    assert 70 < dataset.train_images.mean() < 75
