"""A plan: which device sends which chunk to which device in which step, as a list of hops.

Arrays are flattened and cut into chunks by ``partition.slices``, and the hops move the chunks. A
plan is pure data, which can be printed, drawn and tested without any array:
:func:`contributions` computes its result symbolically, :func:`check` proves that it is an
all-reduce. ``executor.run`` carries it out.
"""

from __future__ import annotations

import collections
import itertools
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

COMBINE: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
"""How two arrays are combined, by an algorithm's op."""


class Hop(NamedTuple):
    """In ``step``, device ``src`` sends its value of ``chunk`` to device ``dst``.

    The receiver adds it to its own value if ``reduce``, otherwise it replaces its own value. Hops
    of one step are simultaneous: what they send is what was there before the step.
    """

    step: int
    src: int
    dst: int
    chunk: int
    reduce: bool


def made(plan: Any, num_devices: int) -> list[Hop]:
    """Return the list of hops of ``plan``, which is that list or a function that returns it.

    Raises TypeError for anything else, such as a generator, which would be empty once checked.
    """
    hops = plan(num_devices) if callable(plan) else plan
    is_list = isinstance(hops, list)
    wrong = [each for each in hops if not isinstance(each, Hop)] if is_list else [hops]
    if wrong:
        got = f"{'a list with ' * is_list}{type(wrong[0]).__name__}"
        raise TypeError(f"a plan must be a list of Hop, got {got}; return the hops in a list")
    return hops


def num_chunks(hops: Sequence[Hop]) -> int:
    """Return the number of chunks that each array is cut into."""
    return 1 + max((hop.chunk for hop in hops), default=0)


def num_steps(hops: Sequence[Hop]) -> int:
    """Return the number of communication steps."""
    return 1 + max((hop.step for hop in hops), default=-1)


def by_step(hops: Sequence[Hop]) -> list[list[Hop]]:
    """Return the hops of each step, in an order that does not depend on the order of the list."""
    return [[*step] for _, step in itertools.groupby(sorted(hops), key=lambda hop: hop.step)]


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

    It goes backwards from the last step, and keeps what writes a value that is needed later.
    """
    needed = {(root, chunk) for chunk in range(num_chunks(hops))}
    kept: list[Hop] = []
    for step in reversed(by_step(hops)):
        now = [hop for hop in step if (hop.dst, hop.chunk) in needed]
        needed -= {(hop.dst, hop.chunk) for hop in now if not hop.reduce}
        needed |= {(hop.src, hop.chunk) for hop in now}
        kept[:0] = now
    return kept


def chunks_sent(hops: Sequence[Hop]) -> collections.Counter:
    """Return how many chunks each device sends; times a chunk's bytes: its bytes on the wire."""
    return collections.Counter(hop.src for hop in hops)


def contributions(hops: Sequence[Hop], num_devices: int) -> np.ndarray:
    """Return how often device k's value is in device i's final value of chunk c, at [i, c, k].

    After an all-reduce, every device's value is in every (device, chunk) exactly once:

    >>> contributions([Hop(0, 1, 0, 0, True), Hop(1, 0, 1, 0, False)], 2).tolist()
    [[[1, 1]], [[1, 1]]]
    """
    counts = np.zeros((num_devices, num_chunks(hops), num_devices), int)
    counts[range(num_devices), :, range(num_devices)] = 1
    for step in by_step(hops):
        sent = [counts[hop.src, hop.chunk].copy() for hop in step]
        for hop, value in zip(step, sent):
            counts[hop.dst, hop.chunk] = value + hop.reduce * counts[hop.dst, hop.chunk]
    return counts


def check(plan: Callable[[int], list[Hop]] | list[Hop], num_devices: int) -> None:
    """Raise ValueError, with what is wrong, unless ``plan`` is an all-reduce of ``num_devices``.

    ``plan`` is a list of hops or a function that returns it for a number of devices. It is an
    all-reduce if every device ends with every device's value exactly once in every chunk, and no
    two hops of a step write the same chunk of a device, unless both add to it. The order of the
    list does not matter: hops of one step are simultaneous. Raises TypeError for anything but a
    list of :class:`Hop`, such as a generator.

    >>> check([Hop(0, 1, 0, 0, True), Hop(0, 0, 1, 0, True)], 2)
    >>> check([Hop(0, 1, 0, 0, True), Hop(1, 0, 1, 0, True)], 2)
    Traceback (most recent call last):
    ValueError: with 2 devices, chunk 0 of device 1 must have device 1's value once, got it 2 times
    """
    hops = made(plan, num_devices)
    of = f"with {num_devices} device{'s' * (num_devices != 1)}, "
    for hop in hops:
        if not {hop.src, hop.dst} <= {*range(num_devices)} or hop.src == hop.dst:
            raise ValueError(f"{of}{hop} must be between two devices of 0 to {num_devices - 1}")
        if min(hop.step, hop.chunk) < 0:
            raise ValueError(f"{of}{hop} must have a step and a chunk of at least 0")
    for step in by_step(hops):
        written: dict[tuple[int, int], Hop] = {}
        for hop in step:
            other = written.get((hop.dst, hop.chunk))
            if other and not (hop.reduce and other.reduce):
                raise ValueError(f"{of}{other} and {hop} write the same chunk in the same step")
            written[hop.dst, hop.chunk] = hop
    counts = contributions(hops, num_devices)
    for device, chunk, source in np.argwhere(counts != 1):
        must = f"chunk {chunk} of device {device} must have device {source}'s value once"
        raise ValueError(f"{of}{must}, got it {counts[device, chunk, source]} times")
