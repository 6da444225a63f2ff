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
from typing import Callable, NamedTuple, Sequence

import numpy as np

from gluonpar.plans import partition, registry
from gluonpar.plans.plan import Hop, num_chunks, num_steps


class Link(NamedTuple):
    """The latency of a link in seconds, and its bandwidth in bytes/s in each direction."""

    latency: float
    bandwidth: float


# Bandwidths by specification, less what protocols take; latencies of a copy on an idle machine.
PCIE = Link(10e-6, 12e9)  # PCIe 3.0 with 16 lanes
BETWEEN_SOCKETS = Link(1e-6, 20e9)  # Intel's QPI and UPI
NVSWITCH = Link(5e-6, 144e9)  # six links of NVLink 2, from a device to the switch
ETHERNET = Link(25e-6, 1.2e9)  # 10 Gbit/s


class Topology:
    """Devices and the links between them.

    ``links`` are their names, ``latency`` (seconds) and ``bandwidth`` (bytes/s) arrays over them.
    ``routes[src, dst]`` are the indices of the links that a message passes, filled up with -1.
    ``num_devices`` is the number of devices.
    """

    def __init__(
        self, links: Sequence[tuple[str, Link]], routes: Callable[[int, int], Sequence[int]], k: int
    ) -> None:
        self.links, self.num_devices = [name for name, _ in links], k
        kinds = [*(kind for _, kind in links), Link(0.0, math.inf)]  # the last is for -1
        self.latency, self.bandwidth = (np.array(values, float) for values in zip(*kinds))
        links_of = {pair: routes(*pair) for pair in itertools.permutations(range(k), 2)}
        longest = max(map(len, links_of.values()), default=1)
        self.routes = np.full((k, k, longest), -1)
        for (src, dst), passed in links_of.items():
            self.routes[src, dst, : len(passed)] = passed


def full(num_devices: int, link: Link = PCIE) -> Topology:
    """Return a topology with a link between every two devices, as the cost model assumes."""
    pairs = [*itertools.permutations(range(num_devices), 2)]
    index = {pair: number for number, pair in enumerate(pairs)}
    links = [(f"{i}-{j}", link) for i, j in pairs]
    return Topology(links, lambda i, j: [index[i, j]], num_devices)


def ethernet(
    num_devices: int, per_host: int = 4, link: Link = PCIE, network: Link = ETHERNET
) -> Topology:
    """Return hosts with ``per_host`` devices each; a host has one link to the network's switch."""
    full_hosts, rest = divmod(num_devices, per_host)
    sizes = [per_host] * full_hosts + [rest] * (rest > 0)
    return _switches(num_devices, sizes, link, network)


def _switches(k: int, sizes: Sequence[int], link: Link, between: Link) -> Topology:
    """Return devices on switches of these sizes; each switch has one link to the others."""
    switch_of = [s for s, size in enumerate(sizes) for _ in range(size)]
    links = []
    for name, kind, count in (("device", link, k), ("switch", between, len(sizes))):
        half = kind._replace(latency=kind.latency / 2)  # a message passes two of them
        links += [(f"{name} {i} {way}", half) for way in ("out", "in") for i in range(count)]

    def route(i: int, j: int) -> Sequence[int]:
        out, into = i, k + j
        if switch_of[i] == switch_of[j]:
            return [out, into]
        return [out, 2 * k + switch_of[i], 2 * k + len(sizes) + switch_of[j], into]

    return Topology(links, route, k)


TOPOLOGIES: dict[str, Callable[[int], Topology]] = {
    "full": full,
    # Two PCIe switches, each with half of the devices and a link to its CPU, which messages from
    # one switch to the other share.
    "pcie": lambda k: _switches(k, partition.sizes(k, 2), PCIE, BETWEEN_SOCKETS),
    # One switch: only a device's own link bounds what it sends and receives.
    "nvswitch": lambda k: _switches(k, [k], NVSWITCH, NVSWITCH),
    "ethernet": ethernet,
}
"""By the names that :func:`simulate` accepts: topologies for K devices."""


class Simulation(NamedTuple):
    """The result of :func:`simulate`: the time of the whole, and of each hop in the plan's order.

    ``begin`` and ``end`` are arrays over the plan's ``hops``.
    """

    seconds: float
    hops: list[Hop]
    begin: np.ndarray
    end: np.ndarray

    @property
    def timed(self) -> list[tuple[Hop, float, float]]:
        """Every hop with the seconds from the beginning at which it begins and ends."""
        return [*zip(self.hops, self.begin.tolist(), self.end.tolist())]


def simulate(
    algorithm: str, num_devices: int, num_bytes: float, topology: str | Topology = "full"
) -> Simulation:
    """Simulate an all-reduce of arrays of ``num_bytes`` each over ``num_devices``.

    ``algorithm`` has a plan. ``topology`` is a :class:`Topology` or the name of one: 'full' (a link
    between every two devices), 'pcie' (two switches), 'nvswitch' or 'ethernet' (hosts of four
    devices).

    Raises ValueError for an algorithm without a plan, an unknown topology or one for another number
    of devices, and for ``num_bytes`` that are not a finite number of at least 0.

    >>> simulate("ring", 4, 1e6, "nvswitch").seconds < simulate("ring", 4, 1e6, "ethernet").seconds
    True
    """
    hops, (steps, src, dst), parts, of_hop = _messages(algorithm, num_devices)
    if isinstance(topology, str):
        if topology not in TOPOLOGIES:
            raise ValueError(f"topology must be one of {', '.join(TOPOLOGIES)}, got {topology!r}")
        topology = _named(topology, num_devices)
    if topology.num_devices != num_devices:
        raise ValueError(f"topology must be for {num_devices}, got {topology.num_devices} devices")
    if not 0 <= num_bytes < math.inf:
        raise ValueError(f"num_bytes must be a finite number of at least 0, got {num_bytes}")
    routes = topology.routes[src, dst]
    latency, sent = topology.latency[routes].sum(axis=1), parts * num_bytes
    begin, end, now = np.zeros(len(parts)), np.zeros(len(parts)), 0.0
    bounds = np.flatnonzero(np.diff(steps, prepend=-1, append=-1))
    for step in map(slice, bounds, bounds[1:]):
        begin[step] = now
        end[step] = now + share(latency[step], sent[step], routes[step], topology.bandwidth)
        now = end[step].max()
    return Simulation(float(now), hops, begin[of_hop], end[of_hop])


@functools.lru_cache(len(TOPOLOGIES))  # 1,024 devices have a million routes
def _named(topology: str, num_devices: int) -> Topology:
    return TOPOLOGIES[topology](num_devices)


@functools.lru_cache(1)  # the plan for 1,024 devices takes seconds, and has millions of hops
def _messages(algorithm: str, num_devices: int) -> tuple:
    """Return hops, messages (step, sender, receiver), their parts of the bytes, each hop's message.

    The messages are in the order of their steps.
    """
    hops = registry.hops(algorithm, num_devices)
    flat = np.fromiter(itertools.chain.from_iterable(hops), np.int64, 5 * len(hops))
    steps, src, dst, _, _ = flat.reshape(-1, 5).T
    shape = (num_steps(hops), num_devices, num_devices)
    codes = np.ravel_multi_index((steps, src, dst), shape)
    messages, of_hop, counts = np.unique(codes, return_inverse=True, return_counts=True)
    return hops, np.unravel_index(messages, shape), counts / num_chunks(hops), of_hop


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
        done = ends_in <= elapsed * (1 + 1e-9)  # flows that end so close together end at once
        left[active] = np.where(done, 0.0, left[active] - np.where(done, 0.0, rate * elapsed))
        now += elapsed
        end[active[done]] = now
    return end
