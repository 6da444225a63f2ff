"""The time of an all-reduce between GPUs, estimated from its plan: docs/algorithms.md.

The constants are not measured on GPUs. The first two follow from small arrays on two CPU contexts
(docs/performance.md): 'star', two messages in two steps, and 'ring', four messages in two steps.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import NamedTuple

from gluonpar.collectives import registry
from gluonpar.collectives.plan import num_chunks, num_steps

MESSAGE_SECONDS = 1e-4  # calling a message's operators from Python, one message after another
STEP_SECONDS = 1e-4  # waking the engine's worker of the next device, which synchronises its stream
BYTES_PER_SECOND = 10e9  # of each connection in each direction: PCIe 3.0 with 16 lanes


class Cost(NamedTuple):
    """Counts of a plan: its messages, its steps, and its critical path in arrays."""

    messages: int
    steps: int
    critical_path: float

    def seconds(self, num_bytes: int) -> float:
        """Return the estimated time for arrays of ``num_bytes``."""
        latency = self.messages * MESSAGE_SECONDS + self.steps * STEP_SECONDS
        return latency + self.critical_path * num_bytes / BYTES_PER_SECOND


@functools.lru_cache(None)
def of(algorithm: str, num_devices: int) -> Cost:
    """Return the cost of an algorithm with a plan.

    >>> of("balanced", 8)
    Cost(messages=112, steps=14, critical_path=1.75)
    """
    hops = registry.named(algorithm).plan(num_devices)
    carried = [Counter() for _ in range(num_steps(hops))]
    for hop in hops:
        carried[hop.step][hop.src, hop.dst] += 1
    busiest = sum(max(step.values()) for step in carried)
    return Cost(len(hops), len(carried), busiest / num_chunks(hops))
