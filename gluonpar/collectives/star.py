"""star: every device sends to device 0, which sums, and sends the sum back to every device.

        1   2   3              1   2   3
         \\  |  /      then      ^  ^  ^
          v v v                 |  |  |
            0                    \\ | /
                                   0

The all-reduce of Dive into Deep Learning (13.5.4). 2(K-1) messages, each the whole array, all of
them in or out of device 0, one after the other: the time grows with K, and the others idle. It is
the shortest to read and has the fewest messages, so it is right for small arrays and for two
devices.
"""

from __future__ import annotations

from gluonpar.collectives.plan import Hop


def plan(num_devices: int) -> list[Hop]:
    """2(K-1) hops of one chunk, the whole array, one a step.

    >>> [(hop.src, hop.dst) for hop in plan(3)]
    [(1, 0), (2, 0), (0, 1), (0, 2)]
    """
    others = range(1, num_devices)
    gather = [Hop(i - 1, i, 0, 0, reduce=True) for i in others]
    scatter = [Hop(num_devices - 2 + i, 0, i, 0, reduce=False) for i in others]
    return gather + scatter
