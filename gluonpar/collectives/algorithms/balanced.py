"""balanced: device c sums chunk c of everybody, then everybody fetches every sum.

    step 1 of K-1                    every device at once, each to another one:
    0 --chunk 1--> 1                 in step s, device i sends chunk i+s to its owner, device i+s,
    1 --chunk 2--> 2                 which adds it to its own; after K-1 steps chunk c is summed on
    2 --chunk 0--> 0                 device c, which sends it to device c+s in the second half

2(K-1) steps; every device sends 2(K-1)/K n bytes, the least that any all-reduce can, in messages of
n/K. No step waits for another one's sum, only for the owner's turn to add, so a slow device holds
up its own chunk alone. It wants wires between all pairs of devices (NVSwitch, PCIe through one
switch, memory).

Source: reduce-scatter and all-gather by direct sends, Thakur, Rabenseifner and Gropp, "Optimization
of Collective Communication Operations in MPICH" (2005), pairwise exchange.
"""

from __future__ import annotations

from gluonpar.collectives.plan import Hop
from gluonpar.collectives.registry import register


@register("balanced")
def plan(num_devices: int) -> list[Hop]:
    """Device c sums chunk c of everybody by direct sends, then sends it to everybody."""
    return reduce_scatter(num_devices) + all_gather(num_devices, first_step=num_devices - 1)


def reduce_scatter(num_devices: int) -> list[Hop]:
    """The first half: chunk c ends summed on device c.

    >>> [(hop.step, hop.src, hop.dst, hop.chunk) for hop in reduce_scatter(2)]
    [(0, 0, 1, 1), (0, 1, 0, 0)]
    """
    return [
        Hop(shift - 1, i, (i + shift) % num_devices, (i + shift) % num_devices, reduce=True)
        for shift in range(1, num_devices)
        for i in range(num_devices)
    ]


def all_gather(num_devices: int, first_step: int = 0) -> list[Hop]:
    """The second half: device c's chunk c goes to every other device."""
    return [
        Hop(first_step + shift - 1, i, (i + shift) % num_devices, i, reduce=False)
        for shift in range(1, num_devices)
        for i in range(num_devices)
    ]
