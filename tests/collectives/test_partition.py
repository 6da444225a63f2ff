"""partition: k parts of n things, none lost, as even as can be, or as their weights say."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gluonpar.collectives import partition

cuts = given(n=st.integers(0, 10_000), k=st.integers(1, 64))


@cuts
def test_sizes_add_up_to_the_whole(n, k):
    assert sum(partition.sizes(n, k)) == n


@cuts
def test_there_is_one_size_a_part(n, k):
    assert len(partition.sizes(n, k)) == k


@cuts
def test_sizes_differ_by_at_most_one_and_the_larger_come_first(n, k):
    sizes = partition.sizes(n, k)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes == sorted(sizes, reverse=True)


@cuts
def test_slices_are_consecutive_and_cover_everything_once(n, k):
    things = list(range(n))
    assert sum((things[part] for part in partition.slices(n, k)), []) == things


@cuts
def test_slices_have_the_sizes(n, k):
    things = range(n)
    assert [len(things[part]) for part in partition.slices(n, k)] == partition.sizes(n, k)


@pytest.mark.parametrize("cut", [partition.sizes, partition.slices])
@pytest.mark.parametrize(("n", "k"), [(-1, 2), (5, 0), (5, -3)])
def test_impossible_cuts_are_refused_with_their_numbers(cut, n, k):
    with pytest.raises(ValueError, match=f"cut {n} things into {k} parts"):
        cut(n, k)


weights = given(weights=st.lists(st.integers(0, 1000), max_size=30), k=st.integers(1, 8))


@weights
def test_no_part_of_a_balance_weighs_more_than_the_mean_and_one_weight(weights, k):
    """Graham's bound for giving each to the part that is lightest by then."""
    parts = partition.balance(weights, k)
    assert len(parts) == len(weights) and set(parts) <= set(range(k))
    load = [sum(w for w, part in zip(weights, parts) if part == i) for i in range(k)]
    assert max(load) <= sum(weights) / k + (1 - 1 / k) * max(weights, default=0) + 1e-9


def test_equal_weights_are_dealt_out_evenly():
    assert sorted(partition.balance([5] * 6, 3)) == [0, 0, 1, 1, 2, 2]
    assert partition.balance([1, 5, 3, 3], 2) == [0, 0, 1, 1]


speeds = st.lists(
    st.one_of(st.integers(1, 9), st.floats(1e-3, 1e3), st.sampled_from([1e-300, 1e300])),
    min_size=1,
    max_size=9,
)


@given(n=st.integers(0, 3000), weights=speeds)
def test_weighted_parts_cover_everything_once_in_order(n, weights):
    things = list(range(n))
    cut = partition.slices(n, len(weights), weights)
    assert sum((things[part] for part in cut), []) == things
    assert [part.stop - part.start for part in cut] == partition.sizes(n, len(weights), weights)


@given(n=st.integers(0, 3000), weights=speeds)
def test_weighted_parts_are_less_than_one_off_their_due_but_for_those_that_would_be_empty(
    n, weights
):
    k = len(weights)
    sizes = partition.sizes(n, k, weights)
    if n < k:
        assert sizes == [1] * n + [0] * (k - n)
        return
    total = sum(map(Fraction, weights))
    due = [n * Fraction(weight) / total for weight in weights]
    assert min(sizes) >= 1
    if min(due) >= 1:
        assert all(abs(size - share) < 1 for size, share in zip(sizes, due))
    assert all(size < share + 1 or size == 1 for size, share in zip(sizes, due))


@given(n=st.integers(0, 3000), weights=speeds)
def test_the_heavier_never_gets_less(n, weights):
    pairs = sorted(zip(weights, partition.sizes(n, len(weights), weights)))
    if n >= len(weights):
        for (light, small), (heavy, large) in zip(pairs, pairs[1:]):
            assert small <= large + (light == heavy)


@cuts
def test_equal_weights_are_no_weights(n, k):
    assert partition.sizes(n, k, [0.1] * k) == partition.sizes(n, k)


@pytest.mark.parametrize(
    ("n", "weights", "sizes"),
    [
        (9, [1, 2], [3, 6]),
        (10, [1, 2], [3, 7]),
        (10, [1, 1, 2], [3, 2, 5]),  # 2.5, 2.5, 5: of equal remainders the first
        (10, [1000, 1, 1], [8, 1, 1]),
        (3, [1, 1000, 1], [1, 1, 1]),
        (2, [1, 1000, 1], [1, 1, 0]),
        (0, [3, 1], [0, 0]),
        (7, [0.1, 0.2, 0.4], [1, 2, 4]),
    ],
)
def test_weighted_sizes_by_value(n, weights, sizes):
    assert partition.sizes(n, len(weights), weights) == sizes


BAD_WEIGHTS = [
    ([1, 2, 3], "3 of them for 2 devices"),
    ([], "0 of them for 2 devices"),
    ([1, 0], "0 is no speed"),
    ([1, -2.5], "-2.5 is no speed"),
    ([math.inf, 1], "inf is no speed"),
    ([1, math.nan], "nan is no speed"),
    ([1, "2"], "'2' is no speed"),
]


@pytest.mark.parametrize("n", [0, 1, 10])
@pytest.mark.parametrize(("weights", "words"), BAD_WEIGHTS)
def test_bad_weights_are_refused_with_their_values(n, weights, words):
    with pytest.raises(ValueError, match=words) as caught:
        partition.sizes(n, 2, weights)
    assert f"weights={weights}" in str(caught.value)
