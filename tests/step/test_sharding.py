"""Shards are the batch, cut in order, each on its own device.

split_and_load cuts arrays along an axis; split_samples cuts lists sample by sample, too.
"""

import collections

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gluonpar.plans import partition
from gluonpar.sharding import split_and_load, split_samples
from tests.support.contexts import contexts, device
from tests.support.nests import NESTS, leaves

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
KINDS = ("numpy", "mx.nd", "mx.np")


def payload(shape, dtype="float32"):
    """As many different values as the dtype has; int64 beyond what a double can hold."""
    values = np.arange(np.prod(shape)).reshape(shape)
    return (values + 2**60 + 1 if dtype == "int64" else values).astype(dtype)


def made_as(kind, values):
    if kind == "numpy":
        return values
    return (mx.nd if kind == "mx.nd" else mx.np).array(values, dtype=values.dtype)


@st.composite
def batches(draw):
    """A shape, an axis of it (counted from either end) and a number of contexts."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    longer = draw(st.integers(1, 20))
    shape = tuple(longer if i == axis % len(shape) else n for i, n in enumerate(shape))
    return shape, axis, draw(st.integers(1, 8))


def assert_is_a_split(shards, batch, ctx, axis, weights=None):
    n = batch.shape[axis]
    assert [shard.shape[axis] for shard in shards] == partition.sizes(n, len(ctx), weights)[:n]
    assert [shard.context for shard in shards] == ctx[: len(shards)]
    assert {np.dtype(shard.dtype) for shard in shards} == {batch.dtype}
    whole = np.concatenate([shard.asnumpy() for shard in shards], axis=axis)
    assert whole.tobytes() == batch.tobytes()
    assert whole.shape == batch.shape


@settings(max_examples=300)
@given(batches(), st.sampled_from(DTYPES), st.sampled_from(KINDS), st.booleans(), st.booleans())
def test_shards_put_together_are_the_batch_bit_for_bit(batch, dtype, kind, weighted, np_semantics):
    shape, axis, k = batch
    values, ctx = payload(shape, dtype), contexts(k)
    weights = ([1, 0.01, 3] * k)[:k] if weighted else None
    with mx.util.np_shape(np_semantics), mx.util.np_array(np_semantics):
        shards = split_and_load(made_as(kind, values), ctx, batch_axis=axis, weights=weights)
        assert_is_a_split(shards, values, ctx, axis, weights)
        if kind == "numpy":
            assert {type(shard) for shard in shards} == {
                mx.np.ndarray if np_semantics else mx.nd.NDArray
            }
            for shard in shards:
                shard[:] = 0
            np.testing.assert_array_equal(values, payload(shape, dtype))


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_every_shard_has_the_nesting_of_the_batch_split_at_the_same_samples(nest):
    batch, ctx = nest(payload((5, 2)), payload((5,), "int32") + 100), contexts(3)
    arrays, structure = leaves(batch)
    shards = [leaves(shard) for shard in split_and_load(batch, ctx)]
    assert [of_shard for _, of_shard in shards] == [structure] * 3
    for pieces, whole in zip(zip(*(of_shard for of_shard, _ in shards)), arrays):
        assert_is_a_split(list(pieces), whole, ctx, 0)


def test_mxnet_data_is_moved_from_the_device_where_it_is():
    batch = mx.nd.array(payload((5, 2)), ctx=device(7))
    assert_is_a_split(split_and_load(batch, contexts(2)), payload((5, 2)), contexts(2), 0)


@pytest.mark.parametrize(
    ("data", "axis", "error", "words"),
    [
        (np.zeros((0, 3)), 0, ValueError, "got 0 along axis 0"),
        (np.zeros((3, 0)), -1, ValueError, "got 0 along axis -1"),
        (np.zeros((4, 3)), 2, ValueError, r"batch .*axis 2 .*\(4, 3\)"),
        (np.zeros((4, 3)), -3, ValueError, r"batch .*axis -3 .*\(4, 3\)"),
        (np.array(1.0), 0, ValueError, r"batch .*axis 0 .*\(\)"),
        ({"y": np.zeros(2)}, 1, ValueError, r"batch\['y'\] .*axis 1 .*\(2,\)"),
        ((np.zeros((4, 3)), np.zeros(5)), 0, ValueError, r"\[0\] of shape \(4, 3\).*\[1\].*\(5,\)"),
        ({}, 0, ValueError, r"array .*got \{\}"),
        ([()], 0, ValueError, r"array .*got \[\(\)\]"),
        ("text", 0, TypeError, "batch .*str"),
        ({"y": [np.zeros(2), 7]}, 0, TypeError, r"batch\['y'\]\[1\] .*int"),
        (None, 0, TypeError, "batch .*NoneType"),
        (mx.nd.ones((4, 4)).tostype("csr"), 0, TypeError, r"csr array.*tostype\('default'\)"),
    ],
)
def test_what_cannot_be_split_is_refused_with_its_values(data, axis, error, words):
    with pytest.raises(error, match=words):
        split_and_load(data, contexts(2), batch_axis=axis)


@pytest.mark.parametrize(
    ("ctx", "error", "words"),
    [
        ([], ValueError, r"ctx must contain .* got \[\]"),
        ([device(0), 1], TypeError, "ctx must be .* got 1"),
        (["cpu(0)"], TypeError, r"ctx must be .* got 'cpu\(0\)'"),
    ],
)
def test_bad_contexts_are_refused_with_their_values(ctx, error, words):
    with pytest.raises(error, match=words):
        split_and_load(payload((4,)), ctx)


Sample = collections.namedtuple("Sample", "boxes name")


def boxes(n):
    """One array a sample, of 1, 2, 3 ... rows, all values different."""
    return [np.arange(4 * (i + 1)).reshape(i + 1, 4) + 1000.0 * i for i in range(n)]


@pytest.mark.parametrize("weights", [None, [5, 1, 1, 2]])
@pytest.mark.parametrize("n", [1, 3, 4, 9])
def test_shards_of_samples_put_together_are_the_batch(n, weights):
    """Every array is on its shard's context, with its dtype."""
    batch = (payload((n, 2)), boxes(n), [mx.nd.array([i], dtype="int32") for i in range(n)])
    shards = split_samples(batch, contexts(4), weights)
    assert_is_a_split([own for own, *_ in shards], batch[0], contexts(4), 0, weights)
    for (own, *lists), ctx in zip(shards, contexts(4)):
        assert [*map(len, lists)] == [len(own)] * 2
        assert {array.context for array in sum(lists, [])} == {ctx}
    for got, want in zip(sum((own for _, own, _ in shards), []), batch[1]):
        assert np.dtype(got.dtype) == want.dtype
        np.testing.assert_array_equal(got.asnumpy(), want)
    labels = sum((own for *_, own in shards), [])
    assert [(np.dtype(a.dtype), a.asscalar()) for a in labels] == [("int32", i) for i in range(n)]


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
        ((np.zeros((3, 2)), boxes(2)), ValueError, r"\(3, 2\); batch\[1\] of length 2"),
        (
            {"a": boxes(1), "b": [1, 2]},
            ValueError,
            r"\['a'\] of length 1; batch\['b'\] of length 2",
        ),
        ([], ValueError, "at least 1 sample, got 0"),
        ([np.zeros((0, 4))], ValueError, r"batch\[0\] .*\(0, 4\).*mx.nd"),
        ([{"b": [np.zeros((0,))]}], ValueError, r"batch\[0\]\['b'\]\[0\] has shape \(0,\)"),
        ({"ids": 7}, TypeError, r"batch\['ids'\] .*int"),
        ([np.zeros(2, "complex64")], TypeError, r"batch\[0\] .*complex64"),
    ],
)
def test_samples_that_cannot_be_split_are_refused_with_their_place(batch, error, words):
    with pytest.raises(error, match=words):
        split_samples(batch, contexts(2))
