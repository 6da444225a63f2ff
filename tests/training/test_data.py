"""Data sets and minibatches."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from idx_files import contents, encode, tiny, write

from gluonpar.training.data.dataset import Dataset, batches, load, synthetic
from gluonpar.training.data.fashion_mnist import STEMS, missing
from gluonpar.training.data.locate import FASHION_MNIST, cache_root, download_folder


def arrays_of(dataset: Dataset) -> list[np.ndarray]:
    return [
        dataset.train_images,
        dataset.train_labels,
        dataset.test_images,
        dataset.test_labels,
    ]


def test_load_gives_the_files_contents_with_a_channel_axis(tmp_path):
    folder = write(tmp_path / "data", contents())
    dataset = load(data_dir=folder, files=tiny(tmp_path))
    assert dataset.name == "fashion-mnist"
    assert dataset.num_classes == 10
    assert dataset.source == f"{folder} (the folder given, edition of 2017-08-31)"
    assert [a.shape for a in arrays_of(dataset)] == [(6, 1, 28, 28), (6,), (4, 1, 28, 28), (4,)]
    for stem, array in zip(STEMS, arrays_of(dataset)):
        assert array.dtype == np.uint8
        assert encode(array[:, 0] if array.ndim == 4 else array) == contents()[stem]


def test_an_unknown_name_lists_the_names():
    with pytest.raises(
        ValueError, match="unknown data set 'mnist': .*'fashion-mnist', 'synthetic'"
    ):
        load("mnist")


def test_a_folder_for_synthetic_data_is_refused():
    with pytest.raises(ValueError, match="data_dir='somewhere' for 'synthetic'"):
        load("synthetic", data_dir="somewhere")


def test_limit_keeps_the_first_training_images_and_all_test_images():
    whole, part = synthetic(), load("synthetic", limit=17)
    np.testing.assert_array_equal(part.train_images, whole.train_images[:17])
    np.testing.assert_array_equal(part.train_labels, whole.train_labels[:17])
    np.testing.assert_array_equal(part.test_images, whole.test_images)
    assert part.source == whole.source
    assert len(whole.limited(6000).train_labels) == 6000


@pytest.mark.parametrize("limit", [0, -3, 6001])
def test_a_limit_out_of_range_names_both_numbers(limit):
    with pytest.raises(ValueError, match=f"limit {limit}: .*6000 training images"):
        load("synthetic", limit=limit)


def test_images_and_labels_must_be_as_many():
    images, labels = np.zeros((3, 1, 2, 2), np.uint8), np.zeros(2, np.uint8)
    with pytest.raises(ValueError, match=r"x, training \(here\): 3 images and 2 labels"):
        Dataset("x", images, labels, images, labels, "here")
    with pytest.raises(ValueError, match=r"x, test \(here\): 2 images and 3 labels"):
        Dataset("x", images, np.zeros(3), images[:2], np.zeros(3), "here")


def test_synthetic_data_look_like_the_real_ones_and_say_they_are_not():
    dataset = synthetic()
    assert [a.shape for a in arrays_of(dataset)] == [
        (6000, 1, 28, 28),
        (6000,),
        (1000, 1, 28, 28),
        (1000,),
    ]
    assert all(array.dtype == np.uint8 for array in arrays_of(dataset))
    assert np.bincount(dataset.train_labels).tolist() == [600] * 10
    assert dataset.name == "synthetic"
    assert "synthetic" in dataset.source and "seed 0" in dataset.source


def test_synthetic_data_are_the_same_everywhere():
    digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays_of(synthetic()))).hexdigest()
    assert digest == "1c705508fab8d31604da0091ac2788cdc9e12a4271666dafddf3808907191de6"
    assert not np.array_equal(synthetic(1).train_images, synthetic().train_images)


def test_synthetic_data_can_be_learnt_and_are_not_trivial():
    dataset = synthetic()
    train = dataset.train_images.reshape(6000, -1).astype(np.float64)
    means = np.stack([train[dataset.train_labels == k].mean(axis=0) for k in range(10)])
    test = dataset.test_images.reshape(1000, 1, -1).astype(np.float64)
    nearest = np.square(test - means).sum(axis=2).argmin(axis=1)
    assert np.mean(nearest == dataset.test_labels) > 0.9
    assert len(np.unique(train, axis=0)) == 6000


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (-1, 5)])
def test_synthetic_data_need_a_sample_of_each(sizes):
    with pytest.raises(ValueError, match=f"num_train={sizes[0]}, num_test={sizes[1]}"):
        synthetic(0, *sizes)


@given(st.integers(0, 40), st.integers(1, 50), st.booleans())
def test_batches_hold_every_sample_once_with_its_label(count, batch_size, shuffled):
    labels = np.arange(count)
    images = (labels * 7 + 3).reshape(count, 1, 1, 1)
    rng = np.random.RandomState(count) if shuffled else None
    found = list(batches(images, labels, batch_size, rng))
    for X, y in found:
        np.testing.assert_array_equal(X[:, 0, 0, 0], y * 7 + 3)
    sizes = [len(y) for _, y in found]
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert all(1 <= size <= batch_size for size in sizes)
    order = [int(label) for _, y in found for label in y]
    assert sorted(order) == list(range(count))
    expected = np.random.RandomState(count).permutation(count) if shuffled else labels
    assert order == expected.tolist()


def test_the_same_generator_shuffles_each_epoch_anew():
    rng = np.random.RandomState(0)
    labels = np.arange(50)
    images = np.zeros((50, 1))
    first, second = (np.concatenate([y for _, y in batches(images, labels, 8, rng)]) for _ in "ab")
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("batch_size", [0, -2])
def test_a_batch_needs_a_sample(batch_size):
    with pytest.raises(ValueError, match=f"batch_size {batch_size}: .*at least 1"):
        batches(np.zeros((3, 1)), np.zeros(3), batch_size)


def test_batches_of_unequal_counts_name_both():
    with pytest.raises(ValueError, match="3 images and 4 labels"):
        batches(np.zeros((3, 1)), np.zeros(4), 2)


def test_the_real_data_where_they_are():
    places = (cache_root() / "fashion-mnist", FASHION_MNIST.debian, download_folder())
    here = [folder for folder in places if not missing(folder)]
    if not here:
        pytest.skip("Fashion-MNIST is in none of " + ", ".join(map(str, places)))
    dataset = load(data_dir=here[0])
    assert dataset.train_images.shape == (60000, 1, 28, 28)
    assert dataset.test_images.shape == (10000, 1, 28, 28)
    assert np.bincount(dataset.train_labels).tolist() == [6000] * 10
    assert np.bincount(dataset.test_labels).tolist() == [1000] * 10
    assert 70 < dataset.train_images.mean() < 75
