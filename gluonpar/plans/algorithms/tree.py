"""tree: partial sums go up a binomial tree to device 0, and the sum comes down the same way.

    reduce, K = 7
    step 1      0 <- 1   2 <- 3   4 <- 5   6
    step 2      0 <----- 2        4 <----- 6
    step 3      0 <-------------- 4               broadcast: the same arrows in reverse

2 ceil(log2 K) communication steps of the whole array; device 0 sends ceil(log2 K) n bytes. No
algorithm built of reduce and broadcast has fewer steps. For large arrays it is bandwidth-bound.

Source: the binomial tree of MPI_Reduce and MPI_Bcast, Thakur et al. (2005).
"""

from __future__ import annotations

from gluonpar.plans.plan import Hop, reverse
from gluonpar.plans.registry import register


@register("tree")
def plan(num_devices: int) -> list[Hop]:
    """Up a binomial tree to device 0 and down again: ceil(log2 K) steps each way.

    >>> [(hop.step, hop.src, hop.dst) for hop in plan(3)]
    [(0, 1, 0), (1, 2, 0), (2, 0, 2), (3, 0, 1)]
    """
    up, step, distance = [], 0, 1
    while distance < num_devices:
        senders = range(distance, num_devices, 2 * distance)
        up += [Hop(step, i, i - distance, 0, reduce=True) for i in senders]
        step, distance = step + 1, 2 * distance
    return up + reverse(up, first_step=step)
