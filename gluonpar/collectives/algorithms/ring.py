"""ring: chunks travel round a circle, growing at each stop, and once more as whole sums.

             chunk i - s                      K = 3         step 0        step 1
    0 ----> 1 ----> 2 ----> 0 ...             device 0       0 -> 1        2 -> 1
                                              device 1       1 -> 2        0 -> 2
    reduce-scatter, step s: device i sends    device 2       2 -> 0        1 -> 0
    chunk i - s, which device i+1 adds to     (sent: chunk -> to device)
    its own; after K-1 steps device i holds
    the whole sum of chunk i+1. All-gather, step s: device i sends chunk i+1-s, which device i+1
    takes over. (All modulo K.)

2(K-1) steps; every device sends 2(K-1)/K n bytes, the least that any all-reduce can, always to the
same neighbour: every wire of the circle is busy all the time and no other wire is needed. The time
hardly depends on K for large arrays; for small ones the 2(K-1) steps, each waiting for the one
before, are too many.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
(2009); made known to deep learning by Gibiansky, "Bringing HPC techniques to deep learning" (2017).
"""

from __future__ import annotations

from gluonpar.collectives.plan import Hop
from gluonpar.collectives.registry import register


@register("ring")
def plan(num_devices: int) -> list[Hop]:
    """Chunks travel round the circle twice: as growing sums, then as whole ones."""
    return circle(num_devices, direction=1, first_chunk=0)


def circle(num_devices: int, direction: int, first_chunk: int) -> list[Hop]:
    """The ring over K chunks from ``first_chunk`` on, upwards (1) or downwards (-1).

    >>> [(hop.src, hop.dst, hop.chunk) for hop in circle(2, 1, 0)]
    [(0, 1, 0), (1, 0, 1), (0, 1, 1), (1, 0, 0)]
    """
    k, half = num_devices, num_devices - 1

    def hop(step: int, i: int, chunk: int, reduce: bool) -> Hop:
        src, dst = i * direction % k, (i + 1) * direction % k
        return Hop(step, src, dst, first_chunk + chunk % k, reduce)

    gather = [hop(s, i, i - s, reduce=True) for s in range(half) for i in range(k)]
    spread = [hop(half + s, i, i + 1 - s, reduce=False) for s in range(half) for i in range(k)]
    return gather + spread
