"""balanced: device c sums chunk c of all devices, then every device fetches every sum.

    step 1 of K-1                    Every device sends at once, each to a different device: in
    0 --chunk 1--> 1                 step s device i sends chunk i+s to its owner, device i+s, which
    1 --chunk 2--> 2                 adds it to its own. After K-1 steps chunk c is summed on device
    2 --chunk 0--> 0                 c, which sends it to device c+s in step s of the second half.

2(K-1) communication steps; every device sends 2(K-1)/K n bytes in messages of n/K. This is the
minimum for an all-reduce: the algorithm is bandwidth-optimal. No chunk passes through an
intermediate device, so a slow device delays only what it sends and the chunk that it owns. It needs
a connection between every pair of devices: NVSwitch, PCIe through one switch, or shared memory.

Source: reduce-scatter and all-gather by pairwise exchange, Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from gluonpar.plans.plan import Hop
from gluonpar.plans.registry import register


def reduce_scatter(num_devices: int) -> list[Hop]:
    """Return the first half: device c ends with the sum of chunk c.

    >>> [(hop.step, hop.src, hop.dst, hop.chunk) for hop in reduce_scatter(2)]
    [(0, 0, 1, 1), (0, 1, 0, 0)]
    """
    return [
        Hop(shift - 1, i, (i + shift) % num_devices, (i + shift) % num_devices, reduce=True)
        for shift in range(1, num_devices)
        for i in range(num_devices)
    ]


def all_gather(num_devices: int, first_step: int = 0) -> list[Hop]:
    """Return the second half: chunk c of device c replaces chunk c of every other device."""
    return [
        Hop(first_step + shift - 1, i, (i + shift) % num_devices, i, reduce=False)
        for shift in range(1, num_devices)
        for i in range(num_devices)
    ]


@register("balanced")
def plan(num_devices: int) -> list[Hop]:
    """Device c sums chunk c of all devices by direct sends, then sends it to all devices."""
    return reduce_scatter(num_devices) + all_gather(num_devices, first_step=num_devices - 1)
