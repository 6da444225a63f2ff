"""balanced: device c sums chunk c of all devices, then every device fetches every sum.

    step 1 of K-1                    Every device sends at once, each to a different device: in
    0 --chunk 1--> 1                 step s device i sends chunk i+s to its owner, device i+s, which
    1 --chunk 2--> 2                 adds it to its own. After K-1 steps chunk c is summed on device
    2 --chunk 0--> 0                 c, which sends it to device c+s in step s of the second half.

2(K-1) communication steps; every device sends 2(K-1)/K n bytes in messages of n/K, the minimum for
an all-reduce. It needs a connection between every pair of devices.

Source: reduce-scatter and all-gather by pairwise exchange, Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from gluonpar.plans.plan import Hop
from gluonpar.plans.registry import register


@register("balanced")
def plan(num_devices: int) -> list[Hop]:
    """Device c sums chunk c of all devices by direct sends, then sends it to all devices.

    >>> [(hop.step, hop.src, hop.dst, hop.chunk) for hop in plan(2)]
    [(0, 0, 1, 1), (0, 1, 0, 0), (1, 0, 1, 0), (1, 1, 0, 1)]
    """
    k = num_devices
    sends = [(shift, i, (i + shift) % k) for shift in range(1, k) for i in range(k)]
    reduce_scatter = [Hop(shift - 1, i, owner, owner, reduce=True) for shift, i, owner in sends]
    all_gather = [Hop(k + shift - 2, i, other, i, reduce=False) for shift, i, other in sends]
    return reduce_scatter + all_gather
