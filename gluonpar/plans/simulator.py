"""An all-reduce on links, simulated: when each message begins and ends. Pure NumPy.

The chunks that a device sends to another in one step are one message. The messages of a step begin
when all messages of the step before have ended, as in the cost model of docs/algorithms.md
(Valiant, "A bridging model for parallel computation", 1990). A message waits for the latencies of
the links on its route, and then its bytes flow. Messages on a link at the same time divide its
bandwidth evenly, and a message flows as fast as its slowest link lets it. Nothing else takes time:
no sums, no operators, no Python.
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

    ``begin`` and ``end`` are arrays over the plan's ``hops``.
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
    algorithm: str, num_devices: int, num_bytes: float, topology: str | Topology = "full"
) -> Simulation:
    """Simulate an all-reduce of arrays of ``num_bytes`` each over ``num_devices``.

    ``algorithm`` has a plan. ``topology`` is a :class:`Topology` or the name of one: 'full' (a link
    between every two devices), 'pcie' (two switches), 'nvlink' (the cube mesh of a DGX-1V),
    'nvswitch' or 'ethernet' (hosts of four devices).

    Raises ValueError for an algorithm without a plan, an unknown topology or one for another number
    of devices, and for ``num_bytes`` that are not a finite number of at least 0.

    >>> simulate("ring", 4, 1e6, "nvswitch").seconds < simulate("ring", 4, 1e6, "ethernet").seconds
    True
    """
    plan = _messages(algorithm, num_devices)
    if isinstance(topology, str):
        if topology not in TOPOLOGIES:
            known = ", ".join(TOPOLOGIES)
            raise ValueError(f"topology must be one of {known}, got {topology!r}")
        topology = TOPOLOGIES[topology](num_devices)
    if topology.num_devices != num_devices:
        got = f"one for {topology.num_devices}"
        raise ValueError(f"topology must be for num_devices={num_devices}, got {got}")
    if not 0 <= num_bytes < math.inf:
        raise ValueError(f"num_bytes must be a finite number of at least 0, got {num_bytes}")
    chunk_bytes = num_bytes / num_chunks(plan.hops)
    begin, end = np.zeros(len(plan.pairs)), np.zeros(len(plan.pairs))
    bounds = np.flatnonzero(np.diff(plan.steps, prepend=-1, append=-1))
    now = 0.0
    known_ends: dict[tuple[bytes, bytes], np.ndarray] = {}
    for first, last in zip(bounds, bounds[1:]):
        pairs, counts = plan.pairs[first:last], plan.num_chunks[first:last]
        key = pairs.tobytes(), counts.tobytes()
        if key not in known_ends:  # most plans have few different steps
            routes = topology.routes[np.divmod(pairs, num_devices)]
            latency = topology.latency[routes].sum(axis=1)
            known_ends[key] = share(latency, counts * chunk_bytes, routes, topology.bandwidth)
        begin[first:last], end[first:last] = now, now + known_ends[key]
        now = end[first:last].max()
    return Simulation(float(now), plan.hops, begin[plan.of_hop], end[plan.of_hop])


class _Messages(NamedTuple):
    """A plan as messages in the order of their steps, with the number of chunks in each.

    ``pairs`` holds sender * K + receiver, ``of_hop`` the index of each hop's message.
    """

    hops: list[Hop]
    steps: np.ndarray
    pairs: np.ndarray
    num_chunks: np.ndarray
    of_hop: np.ndarray


@functools.lru_cache(1)  # the plan for 1,024 devices takes seconds, and has millions of hops
def _messages(algorithm: str, num_devices: int) -> _Messages:
    hops, k = registry.hops(algorithm, num_devices), num_devices
    flat = np.fromiter(itertools.chain.from_iterable(hops), np.int64, 5 * len(hops))
    step, src, dst, _, _ = flat.reshape(-1, 5).T
    codes = (step * k + src) * k + dst
    messages, of_hop, counts = np.unique(codes, return_inverse=True, return_counts=True)
    return _Messages(hops, *np.divmod(messages, k * k), counts, of_hop)


def share(
    begin: np.ndarray, num_bytes: np.ndarray, routes: np.ndarray, bandwidth: np.ndarray
) -> np.ndarray:
    """Return when each flow ends, if it begins at ``begin`` and has ``num_bytes`` to carry.

    A flow passes the links ``routes[flow]``, indices of ``bandwidth``, whose last entry may be
    infinite. Each link is divided evenly among the flows on it at the moment.
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
