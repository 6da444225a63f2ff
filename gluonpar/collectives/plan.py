"""Who sends which chunk to whom at which step: data, to be read, drawn and tested as such.

An array is cut into chunks (``partition.slices`` of its flattened form); a plan moves them. What a
plan means, without any array, is what :func:`contributions` computes; ``execute.run`` carries it
out.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Sequence


class Hop(NamedTuple):
    """At ``step``, device ``src`` sends its value of ``chunk`` to device ``dst``.

    The receiver adds it to its own value if ``reduce``, and else takes it over. Hops of one step
    are independent: none reads what another one of them writes.
    """

    step: int
    src: int
    dst: int
    chunk: int
    reduce: bool


def num_chunks(hops: Sequence[Hop]) -> int:
    """Into how many chunks the arrays are cut."""
    return 1 + max((hop.chunk for hop in hops), default=0)


def num_steps(hops: Sequence[Hop]) -> int:
    """How many steps follow one another."""
    return 1 + max((hop.step for hop in hops), default=-1)


def chunks_sent(hops: Sequence[Hop]) -> Counter:
    """By device, how many chunks it sends; times the chunk's bytes, the bytes on its wire."""
    return Counter(hop.src for hop in hops)


def relabel(hops: Sequence[Hop], root: int, num_devices: int) -> list[Hop]:
    """The same plan, with device ``root`` in device 0's place and the others after it."""
    return [
        hop._replace(src=(hop.src + root) % num_devices, dst=(hop.dst + root) % num_devices)
        for hop in hops
    ]


def contributions(hops: Sequence[Hop], num_devices: int) -> list[list[Counter]]:
    """How often each device's value is in the value of each (device, chunk) after all hops.

    An all-reduce ends with every device exactly once, everywhere:

    >>> contributions([Hop(0, 1, 0, 0, True), Hop(1, 0, 1, 0, False)], 2)
    [[Counter({0: 1, 1: 1})], [Counter({0: 1, 1: 1})]]
    """
    values = [[Counter([i]) for _ in range(num_chunks(hops))] for i in range(num_devices)]
    for hop in hops:
        sent = values[hop.src][hop.chunk]
        kept = values[hop.dst][hop.chunk] if hop.reduce else Counter()
        values[hop.dst][hop.chunk] = kept + sent
    return values
