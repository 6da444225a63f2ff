"""trace: the hops of a plan as a printed table."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import NamedTuple

from gluonpar.plans import registry
from gluonpar.plans.plan import Hop, by_step, chunks_sent, num_chunks


def trace(algorithm: str, num_devices: int) -> Trace:
    """Return the hops of ``algorithm`` between ``num_devices`` devices, to print.

    Raises ValueError for an unknown algorithm or one without a plan, or ``num_devices`` below 1.

    >>> print(trace("tree", 3))
    tree, 3 devices
    step 1  1 -> 0: chunk 0 (add)
    step 2  2 -> 0: chunk 0 (add)
    step 3  0 -> 2: chunk 0 (copy)
    step 4  0 -> 1: chunk 0 (copy)
    4 steps, 4 messages; each device sends, in arrays: 2, 1, 1
    """
    return Trace(algorithm, num_devices, tuple(registry.hops(algorithm, num_devices)))


class Trace(NamedTuple):
    """The hops of an algorithm between ``num_devices`` devices, as returned by :func:`trace`.

    ``print`` shows one row per step. It counts steps from 1, ``Hop.step`` from 0.
    """

    algorithm: str
    num_devices: int
    hops: tuple[Hop, ...]

    def __str__(self) -> str:
        rows = [*map(_messages, by_step(self.hops))]
        width = max((len(message) for row in rows for message in row), default=0)
        lines = [f"{self.algorithm}, {_count(self.num_devices, 'device')}"]
        for s, row in enumerate(rows, start=1):
            messages = "   ".join(message.ljust(width) for message in row).rstrip()
            lines.append(f"step {s:<{len(str(len(rows)))}}  {messages}")
        counts = chunks_sent(self.hops)
        sent = (str(Fraction(counts[i], num_chunks(self.hops))) for i in range(self.num_devices))
        total = f"{_count(len(rows), 'step')}, {_count(len(self.hops), 'message')}"
        return "\n".join([*lines, f"{total}; each device sends, in arrays: {', '.join(sent)}"])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _messages(step: list[Hop]) -> list[str]:
    """The hops as text; chunks with the same sender, receiver and kind share one entry."""
    chunks = defaultdict(list)
    for hop in step:
        chunks[hop.src, hop.dst, hop.reduce].append(str(hop.chunk))
    return [
        f"{src} -> {dst}: chunk{'s' * (len(sent) > 1)} {', '.join(sent)} "
        f"({'add' if reduce else 'copy'})"
        for (src, dst, reduce), sent in chunks.items()
    ]
