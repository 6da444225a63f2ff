"""A plan: which device sends which chunk to which device in which step, as a list of hops.

Arrays are flattened and cut into chunks by ``partition.slices``, and the hops move the chunks. A
plan is pure data, which can be printed, drawn and tested without any array:
:func:`contributions` computes its result symbolically. ``executor.run`` carries it out.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Sequence


class Hop(NamedTuple):
    """In ``step``, device ``src`` sends its value of ``chunk`` to device ``dst``.

    The receiver adds it to its own value if ``reduce``, otherwise it replaces its own value. Hops
    of one step are independent: none reads what another one writes.
    """

    step: int
    src: int
    dst: int
    chunk: int
    reduce: bool


def num_chunks(hops: Sequence[Hop]) -> int:
    """Return the number of chunks that each array is cut into."""
    return 1 + max((hop.chunk for hop in hops), default=0)


def num_steps(hops: Sequence[Hop]) -> int:
    """Return the number of communication steps."""
    return 1 + max((hop.step for hop in hops), default=-1)


def reverse(hops: Sequence[Hop], first_step: int = 0) -> list[Hop]:
    """Return the same hops in the opposite direction and order, as copies from ``first_step`` on.

    It makes a broadcast of a reduce, and an all-gather of a reduce-scatter.
    """
    last = first_step + num_steps(hops) - 1
    return [
        hop._replace(step=last - hop.step, src=hop.dst, dst=hop.src, reduce=False)
        for hop in reversed(hops)
    ]


def towards(hops: Sequence[Hop], root: int) -> list[Hop]:
    """Return the hops on which the final values of device ``root`` depend: a reduce to it.

    >>> towards([Hop(0, 1, 0, 0, True), Hop(1, 0, 1, 0, False)], 0)
    [Hop(step=0, src=1, dst=0, chunk=0, reduce=True)]
    """
    needed, kept = {(root, chunk) for chunk in range(num_chunks(hops))}, []
    for hop in reversed(hops):
        if (hop.dst, hop.chunk) in needed:
            kept.append(hop)
            if not hop.reduce:
                needed.discard((hop.dst, hop.chunk))
            needed.add((hop.src, hop.chunk))
    return kept[::-1]


def chunks_sent(hops: Sequence[Hop]) -> Counter:
    """Return how many chunks each device sends; times a chunk's bytes: its bytes on the wire."""
    return Counter(hop.src for hop in hops)


def relabel(hops: Sequence[Hop], root: int, num_devices: int) -> list[Hop]:
    """Return the plan with device i replaced by device (i + root) modulo ``num_devices``."""
    return [
        hop._replace(src=(hop.src + root) % num_devices, dst=(hop.dst + root) % num_devices)
        for hop in hops
    ]


def contributions(hops: Sequence[Hop], num_devices: int) -> list[list[Counter]]:
    """Return, for each device and chunk, how often each device's value is in the final value.

    After an all-reduce, every device's value is in every (device, chunk) exactly once:

    >>> contributions([Hop(0, 1, 0, 0, True), Hop(1, 0, 1, 0, False)], 2)
    [[Counter({0: 1, 1: 1})], [Counter({0: 1, 1: 1})]]
    """
    values = [[Counter([i]) for _ in range(num_chunks(hops))] for i in range(num_devices)]
    for hop in hops:
        sent = values[hop.src][hop.chunk]
        kept = values[hop.dst][hop.chunk] if hop.reduce else Counter()
        values[hop.dst][hop.chunk] = kept + sent
    return values
