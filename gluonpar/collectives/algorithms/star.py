"""star: every device sends to device 0, which sums, and sends the sum back to every device.

        1   2   3              1   2   3
         \\  |  /      then      ^  ^  ^
          v v v                  \\ | /
            0                      0

2(K-1) steps of one message each, the whole array: device 0 receives and sends (K-1) n bytes, the
others n. The time grows with K and most wires idle, but it has the fewest messages and is the
shortest to read: right for two devices and for small arrays.

Source: ``allreduce`` in Dive into Deep Learning, 13.5.4; the parameter server of one machine.
"""

from __future__ import annotations

from gluonpar.collectives.plan import Hop
from gluonpar.collectives.registry import register


@register("star")
def plan(num_devices: int) -> list[Hop]:
    """All send to device 0, which sums and sends back: the book's.

    >>> [(hop.src, hop.dst) for hop in plan(3)]
    [(1, 0), (2, 0), (0, 1), (0, 2)]
    """
    others = range(1, num_devices)
    gather = [Hop(i - 1, i, 0, 0, reduce=True) for i in others]
    scatter = [Hop(num_devices - 2 + i, 0, i, 0, reduce=False) for i in others]
    return gather + scatter
