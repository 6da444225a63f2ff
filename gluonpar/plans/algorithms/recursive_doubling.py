"""recursive-doubling: pairs exchange whole arrays and both add, at distances 1, 2, 4, ...

    K = 4           step 1          step 2
    device 0        0 <-> 1         01 <-> 2            (values that its sum has
    device 1        1 <-> 0         01 <-> 3             <-> partner)
    device 2        2 <-> 3         23 <-> 0
    device 3        3 <-> 2         23 <-> 1

log2 K communication steps, half of the tree's: no algorithm has fewer. In each, every device sends
its whole sum: log2 K n bytes in all. All devices add the same pairs, and so end with the same bits.
If K is not a power of two, the devices beyond the largest power of two P first send their array to
a partner below P and receive the sum at the end: two more steps.

Source: recursive doubling in Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from gluonpar.plans.plan import Hop, num_steps
from gluonpar.plans.registry import register


@register("recursive-doubling")
def plan(num_devices: int) -> list[Hop]:
    """Pairs exchange whole arrays at distances 1, 2, 4, ...: log2 K steps.

    >>> [(hop.step, hop.src, hop.dst) for hop in plan(3)]
    [(0, 2, 0), (1, 0, 1), (1, 1, 0), (2, 0, 2)]
    """
    power = 1 << (num_devices.bit_length() - 1)
    hops = [Hop(0, i, i - power, 0, reduce=True) for i in range(power, num_devices)]
    distance = 1
    while distance < power:
        step = num_steps(hops)
        hops += [Hop(step, i, i ^ distance, 0, reduce=True) for i in range(power)]
        distance *= 2
    end = num_steps(hops)
    return hops + [Hop(end, i - power, i, 0, reduce=False) for i in range(power, num_devices)]
