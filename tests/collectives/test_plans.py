"""Laws of the plans, as data: no array and no MXNet in sight."""

from collections import Counter

import pytest

from gluonpar.collectives.algorithms import balanced, ring, tree
from gluonpar.collectives.plan import (
    Hop,
    chunks_sent,
    contributions,
    num_chunks,
    num_steps,
    relabel,
)
from gluonpar.collectives.registry import ALGORITHMS, named, register, register_executor

PLANS = {name: algorithm.plan for name, algorithm in ALGORITHMS.items() if algorithm.plan}
EVERY_K = range(1, 10)


def everybody_once(hops, k):
    return all(value == Counter(range(k)) for row in contributions(hops, k) for value in row)


def steps_are_independent(hops):
    """No hop of a step reads what another one of the step writes, and none is written twice."""
    for step in range(num_steps(hops)):
        now = [hop for hop in hops if hop.step == step]
        written = [(hop.dst, hop.chunk) for hop in now]
        if len(set(written)) < len(written) or {(h.src, h.chunk) for h in now} & set(written):
            return False
    return True


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("k", EVERY_K)
class TestEveryPlan:
    def test_everybody_has_everybody_once_everywhere(self, name, k):
        assert everybody_once(PLANS[name](k), k)

    def test_hops_come_in_the_order_of_steps_and_none_is_empty(self, name, k):
        steps = [hop.step for hop in PLANS[name](k)]
        assert steps == sorted(steps)
        assert set(steps) == set(range(num_steps(PLANS[name](k))))

    def test_a_step_is_independent_of_itself(self, name, k):
        assert steps_are_independent(PLANS[name](k))

    def test_nobody_sends_to_itself_or_to_nobody(self, name, k):
        for hop in PLANS[name](k):
            assert hop.src != hop.dst
            assert {hop.src, hop.dst} <= set(range(k))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("k", range(2, 10))
def test_no_hop_can_be_left_out_or_done_twice(name, k):
    hops = PLANS[name](k)
    for i in range(0, len(hops), max(1, len(hops) // 7)):
        assert not everybody_once(hops[:i] + hops[i + 1 :], k)
        if hops[i].reduce:
            assert not everybody_once(hops[: i + 1] + hops[i:], k)


PLANTED = {
    "star": lambda hop, k: hop._replace(dst=hop.dst if hop.reduce else 1),
    "balanced": lambda hop, k: hop._replace(chunk=hop.chunk if hop.reduce else hop.dst),
    "ring": lambda hop, k: hop._replace(
        chunk=hop.chunk if hop.reduce else (hop.chunk - 1) % k  # gathers from the wrong chunk on
    ),
    "bidirectional-ring": lambda hop, k: hop._replace(chunk=hop.chunk % k),
    "tree": lambda hop, k: hop._replace(reduce=True),
    "halving-doubling": lambda hop, k: hop._replace(dst=(hop.dst + (hop.step == 1)) % k),
}


@pytest.mark.parametrize("name", PLANTED)
def test_each_plans_planted_bug_is_caught(name):
    for k in (4, 5):
        wrong = [PLANTED[name](hop, k) for hop in PLANS[name](k)]
        assert not everybody_once(wrong, k)


@pytest.mark.parametrize("k", range(2, 10))
@pytest.mark.parametrize("name", ["ring", "balanced", "bidirectional-ring"])
def test_the_bandwidth_optimal_ones_send_2_k_minus_1_over_k_of_an_array(name, k):
    hops = PLANS[name](k)
    sent = {count / num_chunks(hops) for count in chunks_sent(hops).values()}
    assert sent == {2 * (k - 1) / k}
    assert num_steps(hops) == 2 * (k - 1)


@pytest.mark.parametrize("k", range(2, 10))
def test_the_ring_sends_to_one_neighbour_only(k):
    assert all(hop.dst == (hop.src + 1) % k for hop in ring.plan(k))


@pytest.mark.parametrize("k", range(1, 10))
def test_the_tree_takes_logarithmically_many_steps(k):
    assert num_steps(tree.plan(k)) == 2 * (k - 1).bit_length()


@pytest.mark.parametrize("k", [2, 4, 8])
def test_halving_doubling_has_the_trees_steps_and_the_rings_bytes(k):
    hops = PLANS["halving-doubling"](k)
    assert num_steps(hops) == num_steps(tree.plan(k))
    assert set(chunks_sent(hops).values()) == {2 * (k - 1)}
    assert num_chunks(hops) == k


@pytest.mark.parametrize("k", EVERY_K)
def test_reduce_scatter_leaves_the_sum_of_chunk_i_on_device_i(k):
    values = contributions(balanced.reduce_scatter(k), k)
    assert all(values[i][i] == Counter(range(k)) for i in range(k))


@pytest.mark.parametrize("k", EVERY_K)
@pytest.mark.parametrize("root", [0, 1, 8])
def test_trees_to_and_from_any_root(k, root):
    root %= k
    up = contributions(relabel(tree.reduce(k), root, k), k)
    assert up[root][0] == Counter(range(k))
    down = contributions(relabel(tree.broadcast(k), root, k), k)
    assert all(row[0] == Counter([root]) for row in down)


class TestRegistry:
    def test_ones_own_plan_is_an_algorithm(self):
        @register("pair")
        def pair(num_devices):
            """Two devices swap."""
            return [Hop(0, 0, 1, 0, True), Hop(1, 1, 0, 0, False)]

        try:
            assert named("pair").plan is pair
            assert named("pair").description == "Two devices swap."
        finally:
            del ALGORITHMS["pair"]

    @pytest.mark.parametrize("decorator", [register, register_executor])
    def test_a_name_is_given_once(self, decorator):
        with pytest.raises(ValueError, match="there is an all-reduce algorithm 'ring' already"):
            decorator("ring")(lambda k: [])
        assert named("ring").plan is ring.plan
