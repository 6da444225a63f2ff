"""halving-doubling: pairs of devices exchange halves, then quarters, then eighths; then in reverse.

    K = 4            step 1           step 2           step 3           step 4
    device 0      01 <-> 2 (23)     0 <-> 1 (1)      0 <-> 1 (0)      01 <-> 2 (01)
                  (chunks kept <-> partner (chunks sent))

    Reduce-scatter: each device keeps half of the chunks it has and sends the other half, to
    partners at distance K/2, K/4, ..., 1. All-gather: the same exchanges in the opposite order.

2 log2 K communication steps, and every device sends 2(K-1)/K n bytes, the minimum: as few steps as
the tree with as few bytes as the ring. If K is not a power of two, the devices beyond the largest
power of two P first send their whole array to a partner below P and receive the sum at the end: two
more steps, and n more bytes in each direction for these devices.

Source: Rabenseifner, "Optimization of collective reduction operations" (2004).
"""

from __future__ import annotations

from gluonpar.plans.plan import Hop, num_steps, reverse
from gluonpar.plans.registry import register


@register("halving-doubling")
def plan(num_devices: int) -> list[Hop]:
    """Pairs exchange halves of ever smaller parts, then the reverse: 2 log2 K steps."""
    power = 1 << (num_devices.bit_length() - 1)
    extra = [(i, i - power, c) for i in range(power, num_devices) for c in range(power)]
    hops = [Hop(0, i, partner, c, reduce=True) for i, partner, c in extra]
    halving: list[Hop] = []
    step, distance = num_steps(hops), power // 2
    while distance:
        for i in range(power):
            partner = i ^ distance
            # The chunks that i still has agree with i in the bits above distance.
            half = [c for c in range(power) if c // distance == partner // distance]
            halving += [Hop(step, i, partner, c, reduce=True) for c in half]
        step, distance = step + 1, distance // 2
    hops += halving + reverse(halving, first_step=step)
    end = num_steps(hops)
    return hops + [Hop(end, partner, i, c, reduce=False) for i, partner, c in extra]
