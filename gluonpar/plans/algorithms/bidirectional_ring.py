"""bidirectional-ring: two rings at once in opposite directions, each with half of the chunks.

    0 ====> 1 ====> 2 ====> 0 ...      chunks 0 to K-1
    0 <==== 1 <==== 2 <==== 0 ...      chunks K to 2K-1

2(K-1) communication steps; every device sends 2(K-1)/K n bytes as in the ring, but half to each
neighbour, in messages of n/(2K): over full-duplex connections it takes half the ring's time. With
K = 2 both neighbours are the same device.

Source: an exercise of Dive into Deep Learning, 13.5.8; Jain and Sabharwal, "Optimal bucket
algorithms for large MPI collectives on torus interconnects" (2010).
"""

from __future__ import annotations

from gluonpar.plans.algorithms.ring import one_ring
from gluonpar.plans.plan import Hop
from gluonpar.plans.registry import register


@register("bidirectional-ring")
def plan(num_devices: int) -> list[Hop]:
    """Two rings at once in opposite directions, each with half of the chunks."""
    k = num_devices
    both = one_ring(k, direction=1, first_chunk=0) + one_ring(k, direction=-1, first_chunk=k)
    return sorted(both, key=lambda hop: hop.step)
