"""An all-reduce on links, simulated: when each message begins and ends. Pure NumPy.

A device's chunks that go to the same device in the same step are one message. Steps follow one
another, as in the cost model of docs/algorithms.md: the messages of a step begin when everything of
the step before has ended (Valiant, "A bridging model for parallel computation", 1990). A message
takes the latencies of the links on its route, and then its bytes flow; a link's bandwidth is
divided evenly among the messages on it at that moment, and a message flows as fast as the link with
the least for it. What arrives to be added takes the receiver's memory three times its bytes, two
reads and a write, and the sums of one device share its bandwidth in the same way.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from gluonpar.plans import registry
from gluonpar.plans.plan import Hop, num_chunks
from gluonpar.plans.topologies import TOPOLOGIES, Topology

_AT_ONCE = 1e-9  # of the time until the next event: what ends within it ends with it


class Timed(NamedTuple):
    """A hop, and the seconds from the beginning of the all-reduce at which it begins and ends."""

    hop: Hop
    begin: float
    end: float


class Simulation(NamedTuple):
    """The result of :func:`simulate`: the time of the whole, and of each hop in the plan's order.

    ``begin`` and ``end`` are arrays over the plan's ``hops``. A hop that adds ends with its sum.
    """

    seconds: float
    hops: list[Hop]
    begin: np.ndarray
    end: np.ndarray

    @property
    def timed(self) -> list[Timed]:
        """Every hop with its begin and end."""
        return [Timed(*row) for row in zip(self.hops, self.begin.tolist(), self.end.tolist())]


def simulate(
    algorithm: str,
    num_devices: int,
    num_bytes: float,
    topology: str | Topology = "full",
    memory_bandwidth: float = math.inf,
) -> Simulation:
    """Simulate an all-reduce of arrays of ``num_bytes`` each over ``num_devices``.

    ``algorithm`` has a plan. ``topology`` is a :class:`Topology` or the name of one: 'full' (a link
    between every two devices), 'pcie' (two switches), 'nvlink' (the cube mesh of a DGX-1V),
    'nvswitch' or 'ethernet' (hosts of four devices). ``memory_bandwidth``, in bytes/s, is that of
    each device's memory for sums. Nothing else takes time: no operators, no Python.

    Raises ValueError for an algorithm without a plan, an unknown topology or one for another number
    of devices, and numbers that are not positive.

    >>> simulate("ring", 4, 1e6, "nvswitch").seconds < simulate("ring", 4, 1e6, "ethernet").seconds
    True
    """
    plan = _messages(algorithm, num_devices)
    if isinstance(topology, str):
        if topology not in TOPOLOGIES:
            raise ValueError(f"topology must be one of {', '.join(TOPOLOGIES)}, got {topology!r}")
        topology = TOPOLOGIES[topology](num_devices)
    if not 0 <= num_bytes < math.inf or not memory_bandwidth > 0:
        raise ValueError(
            "num_bytes must be at least 0 and memory_bandwidth positive, got "
            f"{num_bytes} and {memory_bandwidth}"
        )
    if topology.num_devices != num_devices:
        raise ValueError(f"the topology has {topology.num_devices} devices, not {num_devices}")
    return _run(plan, num_bytes / plan.chunks_per_array, topology, memory_bandwidth)


class _Messages(NamedTuple):
    """A plan's messages in the order of their steps: chunks of one step, sender and receiver.

    ``places`` code sender, receiver and whether the receiver adds, :func:`_step`; ``of_hop`` has
    each hop's message.
    """

    hops: list[Hop]
    chunks_per_array: int
    steps: np.ndarray
    places: np.ndarray
    num_chunks: np.ndarray
    of_hop: np.ndarray


@functools.lru_cache(1)  # the plan for 1,024 devices takes seconds, and has millions of hops
def _messages(algorithm: str, num_devices: int) -> _Messages:
    hops, k = registry.hops(algorithm, num_devices), num_devices
    flat = np.fromiter(itertools.chain.from_iterable(hops), np.int64, 5 * len(hops))
    step, src, dst, _, reduce = flat.reshape(-1, 5).T
    codes = (step * k + src) * k * 2 + dst * 2 + reduce
    messages, of_hop, counts = np.unique(codes, return_inverse=True, return_counts=True)
    steps, places = np.divmod(messages, 2 * k * k)
    return _Messages(hops, num_chunks(hops), steps, places, counts, of_hop)


def _run(plan: _Messages, chunk_bytes: float, on: Topology, memory_bandwidth: float) -> Simulation:
    begin, end = np.zeros(len(plan.places)), np.zeros(len(plan.places))
    bounds = np.flatnonzero(np.diff(plan.steps, prepend=-1, append=-1))
    now, known = 0.0, {}
    for first, last in zip(bounds, bounds[1:]):
        places, sizes = plan.places[first:last], plan.num_chunks[first:last]
        key = places.tobytes(), sizes.tobytes()
        if key not in known:  # most plans have few different steps
            known[key] = _step(places, sizes * chunk_bytes, on, memory_bandwidth)
        begin[first:last], end[first:last] = now, now + known[key]
        now = end[first:last].max()
    return Simulation(float(now), plan.hops, begin[plan.of_hop], end[plan.of_hop])


def _step(
    messages: np.ndarray, num_bytes: np.ndarray, on: Topology, memory_bandwidth: float
) -> np.ndarray:
    """Return when each message of a step has ended; it is coded as (src * K + dst) * 2 + reduce."""
    k = on.num_devices
    src, dst, reduce = messages // 2 // k, messages // 2 % k, messages % 2 == 1
    routes = on.routes[src, dst]
    end = share(on.latency[routes].sum(axis=1), num_bytes, routes, on.bandwidth)
    if memory_bandwidth < math.inf and reduce.any():
        memory = np.full(k, memory_bandwidth)
        end[reduce] = share(end[reduce], 3 * num_bytes[reduce], dst[reduce, None], memory)
    return end


def share(
    begin: np.ndarray, num_bytes: np.ndarray, routes: np.ndarray, bandwidth: np.ndarray
) -> np.ndarray:
    """Return when each of some flows ends that begin at ``begin`` with ``num_bytes`` to carry.

    A flow passes the resources ``routes[flow]``, indices of ``bandwidth``, whose last entry may be
    infinite. Each resource is divided evenly among the flows on it at the moment.
    """
    end, left = begin.copy(), np.array(num_bytes, float)
    now = -math.inf
    while (left > 0).any():
        waiting = (left > 0) & (begin > now)
        active = np.flatnonzero((left > 0) & (begin <= now))
        if not len(active):
            now = begin[waiting].min()
            continue
        passed = routes[active]
        on_each = np.bincount(passed.ravel() % len(bandwidth), minlength=len(bandwidth))
        rate = (bandwidth[passed] / on_each[passed]).min(axis=1)
        ends_in = left[active] / rate
        until = begin[waiting].min() - now if waiting.any() else math.inf
        elapsed = min(until, ends_in.min())
        done = ends_in <= elapsed * (1 + _AT_ONCE)
        left[active] = np.where(done, 0.0, left[active] - np.where(done, 0.0, rate * elapsed))
        now += elapsed
        end[active[done]] = now
    return end
