"""Laws of every registered plan, as data, without any array; and faults that they detect."""

from collections import Counter

import pytest

from gluonpar.plans.algorithms import ring
from gluonpar.plans.plan import Hop, contributions, num_chunks, num_steps
from gluonpar.plans.registry import ALGORITHMS, named, register, register_executor

PLANS = {name: algorithm.plan for name, algorithm in ALGORITHMS.items() if algorithm.plan}


def is_allreduce(hops, k):
    """Whether every device ends with the value of every device exactly once in every chunk."""
    return all(value == Counter(range(k)) for row in contributions(hops, k) for value in row)


def steps_are_independent(hops):
    """Whether no hop reads what another hop of its step writes, and none is written twice."""
    for step in range(num_steps(hops)):
        now = [hop for hop in hops if hop.step == step]
        written = [(hop.dst, hop.chunk) for hop in now]
        if len(set(written)) < len(written) or {(h.src, h.chunk) for h in now} & set(written):
            return False
    return True


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("k", range(1, 10))
def test_every_plan_sums_on_every_device_in_ordered_steps_of_independent_hops(name, k):
    hops = PLANS[name](k)
    assert is_allreduce(hops, k)
    steps = [hop.step for hop in hops]
    assert steps == sorted(steps) and set(steps) == set(range(num_steps(hops)))
    assert steps_are_independent(hops)
    for hop in hops:
        assert hop.src != hop.dst and {hop.src, hop.dst} <= set(range(k))


def copied_to_another_device(hop, k, chunks):
    if hop.reduce:
        return None  # may arrive by another route: 1 -> 2 -> 0 for 1 -> 0 is an all-reduce, too
    return [hop._replace(dst=next(d % k for d in range(hop.dst + 1, 2 * k) if d % k != hop.src))]


FAULTS = {  # what stands in place of a hop; None: the fault does not apply to it
    "left out": lambda hop, k, chunks: [],
    "added twice": lambda hop, k, chunks: [hop, hop] if hop.reduce else None,
    "added where it should be copied, or the reverse": lambda hop, k, chunks: [
        hop._replace(reduce=not hop.reduce)
    ],
    "copied to another device": copied_to_another_device,
    "sent back": lambda hop, k, chunks: [hop._replace(src=hop.dst, dst=hop.src)],
    "another chunk": lambda hop, k, chunks: (
        [hop._replace(chunk=(hop.chunk + 1) % chunks)] if chunks > 1 else None
    ),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_any_hop_of_any_plan_is_detected(name, fault):
    for k in (3, 4, 5):
        hops = PLANS[name](k)
        for i, hop in enumerate(hops):
            wrong = FAULTS[fault](hop, k, num_chunks(hops))
            if wrong is not None:
                assert not is_allreduce([*hops[:i], *wrong, *hops[i + 1 :]], k), hop


def test_a_plan_of_ones_own_is_an_algorithm():
    @register("pair")
    def pair(num_devices):
        return [Hop(0, 0, 1, 0, True), Hop(1, 1, 0, 0, False)]

    try:
        assert named("pair").plan is pair
    finally:
        del ALGORITHMS["pair"]


@pytest.mark.parametrize("decorator", [register, register_executor])
def test_a_name_is_registered_once(decorator):
    with pytest.raises(ValueError, match="'ring'"):
        decorator("ring")(lambda k: [])
    assert named("ring").plan is ring.plan
