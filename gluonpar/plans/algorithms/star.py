"""star: every device sends to device 0, which computes the sum and sends it back to every device.

      reduce                 broadcast
        1   2   3              1   2   3
         \\  |  /      then      ^  ^  ^
          v v v                  \\ | /
            0                      0

2(K-1) communication steps of one message each, the whole array: device 0 sends (K-1) n bytes, every
other device n. Most connections are idle, but no algorithm has fewer messages.

Source: ``allreduce`` in Dive into Deep Learning, 13.5.4; a parameter server on one machine.
"""

from __future__ import annotations

from gluonpar.plans.plan import Hop
from gluonpar.plans.registry import register


@register("star")
def plan(num_devices: int) -> list[Hop]:
    """All devices send to device 0, which adds and sends the sum back, as in the book.

    >>> [(hop.src, hop.dst) for hop in plan(3)]
    [(1, 0), (2, 0), (0, 1), (0, 2)]
    """
    k = num_devices
    reduce = [Hop(i - 1, i, 0, 0, reduce=True) for i in range(1, k)]
    broadcast = [Hop(k - 2 + i, 0, i, 0, reduce=False) for i in range(1, k)]
    return reduce + broadcast
