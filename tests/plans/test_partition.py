"""partition: k parts of n items, none lost, as even as possible, or as their weights demand."""

import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gluonpar.plans import partition


@given(n=st.integers(0, 10_000), k=st.integers(1, 64))
def test_k_sizes_add_up_differ_by_at_most_one_and_the_larger_come_first(n, k):
    sizes = partition.sizes(n, k)
    assert (len(sizes), sum(sizes)) == (k, n)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert sizes == partition.sizes(n, k, [0.1] * k)


@pytest.mark.parametrize("cut", [partition.sizes, partition.slices])
@pytest.mark.parametrize(("n", "k"), [(-1, 2), (5, 0), (5, -3)])
def test_impossible_cuts_are_refused_with_their_numbers(cut, n, k):
    with pytest.raises(ValueError, match=f"n={n} and k={k}"):
        cut(n, k)


@given(weights=st.lists(st.integers(0, 1000), max_size=30), k=st.integers(1, 8))
def test_no_part_of_a_balance_exceeds_the_mean_and_one_weight(weights, k):
    """Graham's bound for giving each weight to the part with the smallest sum so far."""
    parts = partition.balance(weights, k)
    assert len(parts) == len(weights) and set(parts) <= set(range(k))
    load = [sum(w for w, part in zip(weights, parts) if part == i) for i in range(k)]
    assert max(load) <= sum(weights) / k + (1 - 1 / k) * max(weights, default=0) + 1e-9


speeds = st.lists(
    st.one_of(st.integers(1, 9), st.floats(1e-3, 1e3), st.sampled_from([1e-300, 1e300])),
    min_size=1,
    max_size=9,
)


@given(n=st.integers(0, 3000), weights=speeds)
def test_slices_cover_everything_once_in_order_and_have_the_sizes(n, weights):
    items, k = list(range(n)), len(weights)
    for shares in (weights, None):
        parts = partition.slices(n, k, shares)
        assert sum((items[part] for part in parts), []) == items
        assert [len(items[part]) for part in parts] == partition.sizes(n, k, shares)


@given(n=st.integers(0, 3000), weights=speeds)
def test_weighted_sizes_are_less_than_one_off_their_share_unless_that_would_be_empty(n, weights):
    k = len(weights)
    sizes = partition.sizes(n, k, weights)
    if n < k:
        assert sizes == [1] * n + [0] * (k - n)
        return
    total = sum(map(Fraction, weights))
    shares = [n * Fraction(weight) / total for weight in weights]
    assert min(sizes) >= 1
    if min(shares) >= 1:
        assert all(abs(size - share) < 1 for size, share in zip(sizes, shares))
    assert all(size < share + 1 or size == 1 for size, share in zip(sizes, shares))


@given(n=st.integers(0, 3000), weights=speeds)
def test_a_larger_weight_never_gets_less(n, weights):
    pairs = sorted(zip(weights, partition.sizes(n, len(weights), weights)))
    if n >= len(weights):
        for (light, small), (heavy, large) in zip(pairs, pairs[1:]):
            assert small <= large + (light == heavy)


BAD_WEIGHTS = ([1, 2, 3], [], [1, 0], [1, -2.5], [math.inf, 1], [1, math.nan], [1, "2"])


@pytest.mark.parametrize("n", [0, 1, 10])
@pytest.mark.parametrize("weights", BAD_WEIGHTS, ids=str)
def test_bad_weights_are_refused_with_their_values(n, weights):
    with pytest.raises(ValueError, match=re.escape(f"weights={weights} must be 2 ")):
        partition.sizes(n, 2, weights)
