"""partition: k parts of n things, none lost, as even as can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gluonpar import partition

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
