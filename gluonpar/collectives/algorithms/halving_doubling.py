"""halving-doubling: pairs exchange halves, then quarters, then eighths; and the same way back.

    K = 4            step 0           step 1           step 2           step 3
    device 0      01 <-> 2 (23)     0 <-> 1 (1)      0 <-> 1 (0)      01 <-> 2 (01)
    each keeps half of what it has and sends the other half, to partners at distance K/2, ..., 1

2 log2 K steps, and every device sends 2(K-1)/K n bytes, the least possible: as few steps as the
tree with the ring's bytes. If K is no power of two, the devices beyond the largest one P first send
their whole array to a partner below and get the sum at the end: 2 steps more, and
n bytes more each way for them.

Source: Rabenseifner, "Optimization of collective reduction operations" (2004).
"""

from __future__ import annotations

from gluonpar.collectives.plan import Hop, num_steps
from gluonpar.collectives.registry import register


@register("halving-doubling")
def plan(num_devices: int) -> list[Hop]:
    """Pairs exchange halves of ever smaller parts, then double them back: 2 log2 K steps."""
    power = 1 << (num_devices.bit_length() - 1)
    extra = range(power, num_devices)
    fold = [Hop(0, i, i - power, c, reduce=True) for i in extra for c in range(power)]
    halving = _halve(power, first_step=num_steps(fold))
    middle = fold + halving
    doubling = _double(halving, first_step=num_steps(middle))
    end = num_steps(middle + doubling)
    unfold = [Hop(end, i - power, i, c, reduce=False) for i in extra for c in range(power)]
    return middle + doubling + unfold


def _halve(power: int, first_step: int) -> list[Hop]:
    """Every device sends half of what it still has, and keeps the half that its number says."""
    hops, step, distance = [], first_step, power // 2
    while distance:
        for i in range(power):
            partner = i ^ distance
            # What i still has agrees with i in the bits above distance; the partner keeps its half.
            part = [c for c in range(power) if c // distance == partner // distance]
            hops += [Hop(step, i, partner, c, reduce=True) for c in part]
        step, distance = step + 1, distance // 2
    return hops


def _double(halving: list[Hop], first_step: int) -> list[Hop]:
    """The same exchanges in the opposite order: what was sent to be summed comes back as a sum."""
    last = max((hop.step for hop in halving), default=0)
    return [
        Hop(first_step + last - hop.step, hop.dst, hop.src, hop.chunk, reduce=False)
        for hop in reversed(halving)
    ]
