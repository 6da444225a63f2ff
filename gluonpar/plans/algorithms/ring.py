"""ring: chunks travel around a ring, first as growing partial sums, then as complete sums.

             chunk i - s                      K = 3         step 1        step 2
    0 ----> 1 ----> 2 ----> 0 ...             device 0       0 -> 1        2 -> 1
                                              device 1       1 -> 2        0 -> 2
    Reduce-scatter, step s+1: device i sends  device 2       2 -> 0        1 -> 0
    chunk i - s, which device i+1 adds to     (chunk sent -> receiving device)
    its own; after K-1 steps device i holds
    the complete sum of chunk i+1. All-gather, step s+1: device i sends chunk i+1-s, which
    device i+1 puts in place of its own. (All modulo K; s counts from 0.)

2(K-1) communication steps; every device sends 2(K-1)/K n bytes, the minimum for an all-reduce,
always to the same neighbour: every connection of the ring is busy all the time and no other one is
needed. For small arrays it is latency-bound: each of the 2(K-1) steps waits for the one before.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
(2009); introduced to deep learning by Gibiansky, "Bringing HPC techniques to deep learning" (2017).
"""

from __future__ import annotations

from gluonpar.plans.plan import Hop
from gluonpar.plans.registry import register


def one_ring(num_devices: int, direction: int, first_chunk: int) -> list[Hop]:
    """Return the ring of K chunks from ``first_chunk`` on, to the next (1) or previous (-1) device.

    >>> [(hop.src, hop.dst, hop.chunk) for hop in one_ring(2, 1, 0)]
    [(0, 1, 0), (1, 0, 1), (0, 1, 1), (1, 0, 0)]
    """
    k, steps = num_devices, range(num_devices - 1)

    def hop(step: int, i: int, chunk: int, reduce: bool) -> Hop:
        src, dst = i * direction % k, (i + 1) * direction % k
        return Hop(step, src, dst, first_chunk + chunk % k, reduce)

    reduce_scatter = [hop(s, i, i - s, reduce=True) for s in steps for i in range(k)]
    all_gather = [hop(k - 1 + s, i, i + 1 - s, reduce=False) for s in steps for i in range(k)]
    return reduce_scatter + all_gather


@register("ring")
def plan(num_devices: int) -> list[Hop]:
    """Chunks travel around a ring twice: as growing partial sums, then as complete sums."""
    return one_ring(num_devices, direction=1, first_chunk=0)
