"""Topologies: the links between devices, and the links that a message passes. Pure NumPy.

Messages that pass a link at the same time share its bandwidth (:mod:`gluonpar.plans.simulator`).
"""

from __future__ import annotations

import itertools
import math
from typing import Callable, NamedTuple, Sequence

import numpy as np


class Link(NamedTuple):
    """The latency of a link in seconds, and its bandwidth in bytes/s in each direction."""

    latency: float
    bandwidth: float


# Bandwidths by specification, less what protocols take; latencies of a copy on an idle machine.
PCIE = Link(10e-6, 12e9)  # PCIe 3.0 with 16 lanes
BETWEEN_SOCKETS = Link(1e-6, 20e9)  # Intel's QPI and UPI
NVLINK = Link(5e-6, 24e9)  # one link of NVLink 2
NVSWITCH = Link(5e-6, 144e9)  # six of them, from a device to the switch
ETHERNET = Link(25e-6, 1.2e9)  # 10 Gbit/s


class Topology:
    """Devices and the links between them.

    ``links`` are their names, ``latency`` (seconds) and ``bandwidth`` (bytes/s) arrays over them.
    ``routes[src, dst]`` are the indices of the links that a message passes, filled up with -1.
    """

    def __init__(
        self, links: Sequence[tuple[str, Link]], routes: Callable[[int, int], Sequence[int]], k: int
    ) -> None:
        self.links = [name for name, _ in links]
        kinds = [*(kind for _, kind in links), Link(0.0, math.inf)]  # the last is for -1
        self.latency, self.bandwidth = (np.array(values, float) for values in zip(*kinds))
        if not (self.latency >= 0).all() or not (self.bandwidth > 0).all():
            raise ValueError("latencies must be at least 0 and bandwidths positive")
        links_of = {pair: routes(*pair) for pair in itertools.permutations(range(k), 2)}
        longest = max(map(len, links_of.values()), default=1)
        self.routes = np.full((k, k, longest), -1)
        for (src, dst), passed in links_of.items():
            self.routes[src, dst, : len(passed)] = passed

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.routes)


def full(num_devices: int, link: Link = PCIE) -> Topology:
    """Return a topology with a link between every two devices, as the cost model assumes."""
    pairs = [*itertools.permutations(range(num_devices), 2)]
    index = {pair: number for number, pair in enumerate(pairs)}
    links = [(f"{i}-{j}", link) for i, j in pairs]
    return Topology(links, lambda i, j: [index[i, j]], num_devices)


def pcie(num_devices: int, link: Link = PCIE, sockets: Link = BETWEEN_SOCKETS) -> Topology:
    """Return a machine with two PCIe switches, each with half of the devices and a link to its CPU.

    ``sockets`` connects the CPUs. Messages from one switch to the other share these links.
    """
    return _switches(num_devices, [num_devices - num_devices // 2, num_devices // 2], link, sockets)


def nvswitch(num_devices: int, link: Link = NVSWITCH) -> Topology:
    """Return devices on one switch: only a device's own link bounds what it sends and receives."""
    return _switches(num_devices, [num_devices], link, link)


def ethernet(
    num_devices: int, per_host: int = 4, link: Link = PCIE, network: Link = ETHERNET
) -> Topology:
    """Return hosts with ``per_host`` devices each; a host has one link to the network's switch."""
    if per_host < 1:
        raise ValueError(f"per_host must be at least 1, got {per_host}")
    full_hosts, rest = divmod(num_devices, per_host)
    sizes = [per_host] * full_hosts + [rest] * (rest > 0)
    return _switches(num_devices, sizes, link, network)


# NVLink between the eight devices of a DGX-1V: how many links, by pair.
_CUBE_MESH = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2}
_CUBE_MESH.update({(2, 3): 2, (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2})
_CUBE_MESH.update({(5, 6): 2, (5, 7): 1, (6, 7): 2})


def cube_mesh(num_devices: int = 8, link: Link = NVLINK, pci: Link = PCIE) -> Topology:
    """Return the hybrid cube mesh of a DGX-1V, or its first devices.

    Neighbours have one or two links of NVLink; other pairs send through the PCIe switches, as
    :func:`pcie`. Source: NVIDIA, "DGX-1 with Tesla V100 System Architecture" (2017).
    """
    if num_devices > 8:
        raise ValueError(f"a cube mesh has at most 8 devices, got {num_devices}")
    beside = pcie(num_devices, pci)
    links = [(name, Link(*of)) for name, *of in zip(beside.links, beside.latency, beside.bandwidth)]
    direct = {}
    for (i, j), count in _CUBE_MESH.items():
        for pair in ((i, j), (j, i)):
            direct[pair] = len(links)
            links.append((f"NVLink {pair[0]}-{pair[1]}", link._replace(bandwidth=count * link[1])))

    def route(i: int, j: int) -> Sequence[int]:
        through_pcie = [number for number in beside.routes[i, j] if number >= 0]
        return [direct[i, j]] if (i, j) in direct else through_pcie

    return Topology(links, route, num_devices)


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
        first = 2 * k
        return [out, first + switch_of[i], first + len(sizes) + switch_of[j], into]

    return Topology(links, route, k)


TOPOLOGIES: dict[str, Callable[[int], Topology]] = {
    "full": full,
    "pcie": pcie,
    "nvlink": cube_mesh,
    "nvswitch": nvswitch,
    "ethernet": ethernet,
}
"""By the names that :func:`gluonpar.collectives.simulate` accepts: topologies for K devices."""
