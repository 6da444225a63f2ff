"""Laws of simulated all-reduces: the closed forms, bandwidth, causality, and who shares a link."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import TOPOLOGIES, Link, ethernet, full, share, simulate

from gluonpar.collectives import ALGORITHMS, Hop
from tests.support.cards import formula

PLANS = [name for name, plan in ALGORITHMS.items() if plan]
LINK = Link(latency=3e-5, bandwidth=7e9)

plans = st.sampled_from(PLANS)
topologies = st.sampled_from(sorted(TOPOLOGIES))
sizes = st.sampled_from([0, 1, 4096, 516_272, 1e8])


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("k", range(2, 17))
def test_without_shared_links_it_is_the_closed_form_of_the_algorithms_card(name, k):
    for num_bytes in (0, 4096, 516_272, 1e8):
        latency = formula(name, "steps", k) * LINK.latency
        transfer = formula(name, "critical path", k) * num_bytes / LINK.bandwidth
        found = simulate(name, k, num_bytes, full(k, LINK)).seconds
        assert found == pytest.approx(latency + transfer, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(plans, st.integers(2, 8), sizes, topologies, st.data())
def test_twice_the_bandwidth_of_a_link_is_never_slower(name, k, num_bytes, on, data):
    topology = TOPOLOGIES[on](k)
    before = simulate(name, k, num_bytes, topology)
    topology.bandwidth[data.draw(st.integers(0, len(topology.links) - 1))] *= 2
    assert simulate(name, k, num_bytes, topology).seconds <= before.seconds * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(plans, st.integers(2, 9), sizes, st.sampled_from(["full", "pcie", "nvswitch", "ethernet"]))
def test_no_message_begins_before_what_it_sends_is_there(name, k, num_bytes, on):
    there = {}  # when the value of (device, chunk) was written last
    result = simulate(name, k, num_bytes, on)
    for _, step in itertools.groupby(result.timed, key=lambda timed: timed[0].step):
        before = dict(there)
        for hop, begin, end in step:
            assert begin >= before.get((hop.src, hop.chunk), 0.0)
            assert begin >= before.get((hop.dst, hop.chunk), 0.0)
            assert end >= begin
            there[hop.dst, hop.chunk] = max(end, there.get((hop.dst, hop.chunk), 0.0))
    assert result.seconds == max(there.values())


@settings(max_examples=60, deadline=None)
@given(plans, st.integers(2, 8), topologies)
def test_no_link_carries_more_than_its_bandwidth(name, k, on):
    topology, num_bytes = TOPOLOGIES[on](k), 1e8
    result = simulate(name, k, num_bytes, topology)
    chunk = num_bytes / (1 + max(hop.chunk for hop in result.hops))
    carried = np.zeros(len(topology.links) + 1)
    for hop in result.hops:
        carried[topology.routes[hop.src, hop.dst]] += chunk
    assert result.seconds >= (carried / topology.bandwidth)[:-1].max() * (1 - 1e-9)


def test_flows_divide_a_link_evenly_while_both_are_on_it():
    # On one link of 1 byte/s: 2 bytes from 0 on and 4 from 1 on. The first has 1 byte left when the
    # second begins, takes 2 s for it, and leaves 3 bytes of the second, alone from then on.
    routes, bandwidth = np.array([[0], [0]]), np.array([1.0, math.inf])
    ends = share(np.array([0.0, 1.0]), np.array([2.0, 4.0]), routes, bandwidth)
    assert ends.tolist() == [3.0, 6.0]
    # The second passes a slower link, too: it takes that link's rate, and its half of the other.
    routes = np.array([[0, -1], [0, 1]])
    bandwidth = np.array([1.0, 0.25, math.inf])
    assert share(np.zeros(2), np.array([1.0, 1.0]), routes, bandwidth).tolist() == [2.0, 4.0]


def test_the_chunks_of_a_step_from_one_device_to_another_are_one_message():
    def funnel(num_devices):
        """Step 0: chunk 0 from 1 and 2 to 0. Step 1: chunks 0 and 1, otherwise the same."""
        hops = [(0, 1, 0), (0, 2, 0), (1, 1, 0), (1, 1, 1), (1, 2, 0), (1, 2, 1)]
        return [Hop(step, src, 0, chunk, reduce=True) for step, src, chunk in hops]

    ALGORITHMS["funnel"] = funnel  # not an all-reduce
    try:
        found = simulate("funnel", 3, 2e6, full(3, Link(1e-3, 1e9)))
    finally:
        del ALGORITHMS["funnel"]
    one, two = 2e-3, 2e-3 + 1e-3 + 2e-3  # a latency, and one or two chunks of 1 MB
    assert [end for _, _, end in found.timed] == pytest.approx([one] * 2 + [two] * 4)


def test_a_message_passes_its_devices_links_and_those_of_the_switches():
    on = ethernet(8, per_host=4, link=Link(2e-6, 1e9), network=Link(8e-6, 1e9))
    names = [on.links[i] for i in on.routes[1, 6]]
    assert names == ["device 1 out", "switch 0 out", "switch 1 in", "device 6 in"]
    assert [on.links[i] for i in on.routes[6, 5] if i >= 0] == ["device 6 out", "device 5 in"]
    assert on.latency[on.routes[1, 6]].sum() == pytest.approx(10e-6)
    assert simulate("tree", 8, 0, on).seconds == pytest.approx(4 * 2e-6 + 2 * 10e-6)


@pytest.mark.parametrize(
    ("arguments", "quoted"),
    [
        (("host", 4, 1e6), "host"),
        (("rings", 4, 1e6), "rings"),
        (("ring", 0, 1e6), "0"),
        (("ring", 4, -1), "-1"),
        (("ring", 4, math.nan), "nan"),
        (("ring", 4, 1e6, "bus"), "bus"),
        (("ring", 4, 1e6, full(3)), "3"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, quoted):
    with pytest.raises(ValueError, match=quoted):
        simulate(*arguments)
