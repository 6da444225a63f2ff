"""split_and_load: shards are the batch, cut in order, each on its own device."""

import mxnet as mx
import numpy as np
import pytest
from contexts import contexts, device
from hypothesis import given, settings
from hypothesis import strategies as st
from nests import NESTS, leaves

from gluonpar.plans import partition
from gluonpar.runtime import memory
from gluonpar.sharding import split_and_load

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


@pytest.mark.parametrize("view", ["transposed", "reversed", "strided", "read-only"])
def test_numpy_views_are_cut_like_any_array(view):
    batch = payload((9, 6))
    batch = {"transposed": batch.T, "reversed": batch[::-1], "strided": batch[::2, 1::3]}.get(
        view, batch
    )
    batch.flags.writeable = view != "read-only"
    assert_is_a_split(split_and_load(batch, contexts(4)), batch, contexts(4), 0)


@pytest.mark.parametrize(
    ("kind", "type_"),
    [("numpy", mx.nd.NDArray), ("mx.nd", mx.nd.NDArray), ("mx.np", mx.np.ndarray)],
)
def test_types_without_numpy_semantics(kind, type_):
    shards = split_and_load(made_as(kind, payload((4,))), contexts(2))
    assert [type(shard) for shard in shards] == [type_] * 2


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_every_shard_has_the_nesting_of_the_batch_split_at_the_same_samples(nest):
    batch, ctx = nest(payload((5, 2)), payload((5,), "int32") + 100), contexts(3)
    arrays, structure = leaves(batch)
    shards = [leaves(shard) for shard in split_and_load(batch, ctx)]
    assert [of_shard for _, of_shard in shards] == [structure] * 3
    for pieces, whole in zip(zip(*(of_shard for of_shard, _ in shards)), arrays):
        assert_is_a_split(list(pieces), whole, ctx, 0)


def test_shards_of_numpy_data_never_alias_it():
    batch = payload((6, 2))
    for shard in split_and_load(batch, contexts(3)):
        shard[:] = -1
    mx.nd.waitall()
    np.testing.assert_array_equal(batch, payload((6, 2)))


def test_numpy_data_goes_to_its_own_device_and_is_never_whole_on_one(monkeypatch):
    staged = []

    def recorded(values, ctx, create=memory.from_numpy):
        staged.append((values.shape, ctx))
        return create(values, ctx)

    monkeypatch.setattr(memory, "from_numpy", recorded)
    split_and_load(payload((8, 3)), contexts(4))
    assert staged == [((2, 3), c) for c in contexts(4)]


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


def test_one_context_may_stand_without_a_list_and_a_tuple_is_a_list():
    for ctx in (device(1), (device(1),), (device(1), device(0))):
        shards = split_and_load(payload((4,)), ctx)
        want = list(ctx) if isinstance(ctx, tuple) else [ctx]
        assert [shard.context for shard in shards] == want
