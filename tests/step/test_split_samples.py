"""split_samples: lists are cut sample by sample, arrays along axis 0, nests are kept."""

import collections

import mxnet as mx
import numpy as np
import pytest
from contexts import contexts

from gluonpar.plans import partition
from gluonpar.sharding import split_samples

Sample = collections.namedtuple("Sample", "boxes name")


def boxes(n):
    """One array a sample, of 1, 2, 3 ... rows, all values different."""
    return [np.arange(4 * (i + 1)).reshape(i + 1, 4) + 1000.0 * i for i in range(n)]


@pytest.mark.parametrize("weights", [None, [5, 1, 1, 2]])
@pytest.mark.parametrize("n", [1, 3, 4, 9])
def test_shards_put_together_are_the_batch(n, weights):
    batch = (np.arange(n * 2).reshape(n, 2), boxes(n))
    shards = split_samples(batch, contexts(4), weights)
    sizes = [size for size in partition.sizes(n, 4, weights) if size]
    assert [len(own) for _, own in shards] == sizes
    assert [len(own) for own, _ in shards] == sizes
    whole = np.concatenate([own.asnumpy() for own, _ in shards])
    np.testing.assert_array_equal(whole, batch[0])
    for got, want in zip(sum((own for _, own in shards), []), batch[1]):
        np.testing.assert_array_equal(got.asnumpy(), want)


def test_every_array_is_on_its_shards_context_with_its_dtype():
    batch = [boxes(5), [mx.nd.ones((2,), dtype="int32")] * 5]
    for shard, ctx in zip(split_samples(tuple(batch), contexts(2)), contexts(2)):
        assert {a.context for a in shard[0] + shard[1]} == {ctx}
        assert {np.dtype(a.dtype) for a in shard[0]} == {np.dtype("float64")}
        assert {np.dtype(a.dtype) for a in shard[1]} == {np.dtype("int32")}


def test_nests_are_kept_and_other_values_are_unchanged():
    batch = {
        "x": np.arange(3),
        "y": ([Sample(own, f"{i}.jpg") for i, own in enumerate(boxes(3))], [0.5, None, "two"]),
    }
    first, second = split_samples(batch, contexts(2))
    assert (list(first), type(first["y"])) == (["x", "y"], tuple)
    assert [type(sample) for sample in first["y"][0]] == [Sample, Sample]
    assert [sample.name for sample in first["y"][0] + second["y"][0]] == ["0.jpg", "1.jpg", "2.jpg"]
    assert (first["y"][1], second["y"][1]) == ([0.5, None], ["two"])
    assert second["y"][0][0].boxes.shape == (3, 4)


def test_samples_without_boxes_are_kept_under_numpy_semantics():
    with mx.util.np_shape(True), mx.util.np_array(True):
        shards = split_samples([np.zeros((0, 4)), np.ones((2, 4))], contexts(2))
        assert [shard[0].shape for shard in shards] == [(0, 4), (2, 4)]


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (
            (np.zeros((3, 2)), boxes(2)),
            ValueError,
            r"batch\[0\] .*\(3, 2\); batch\[1\] of length 2",
        ),
        (
            {"a": boxes(1), "b": [1, 2]},
            ValueError,
            r"batch\['a'\] of length 1; batch\['b'\] of length 2",
        ),
        ([], ValueError, "at least 1 sample, got 0"),
        ((), ValueError, r"array .*got \(\)"),
        ((np.zeros(()),), ValueError, r"batch\[0\] .*shape \(\)"),
        ([np.zeros((0, 4))], ValueError, r"batch\[0\] .*\(0, 4\).*mx.nd"),
        ([{"b": [np.zeros((0,))]}], ValueError, r"batch\[0\]\['b'\]\[0\] has shape \(0,\)"),
        ("text", TypeError, "batch .*str"),
        ({"ids": 7}, TypeError, r"batch\['ids'\] .*int"),
        ([np.zeros(2, "complex64")], TypeError, r"batch\[0\] .*complex64"),
        (np.zeros(2, "uint16"), TypeError, "batch .*uint16"),
    ],
)
def test_what_cannot_be_split_is_refused_with_its_place(batch, error, words):
    with pytest.raises(error, match=words):
        split_samples(batch, contexts(2))
