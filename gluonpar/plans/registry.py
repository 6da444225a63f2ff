"""The all-reduce algorithms by name: decorators that register one, and its hops as a table."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from gluonpar.plans.plan import Hop, by_step, check, chunks_sent, made, num_chunks

COMBINE: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
"""The ops of an algorithm, by name, and the functions that combine two NumPy arrays by them."""


class Algorithm(NamedTuple):
    """An all-reduce algorithm: a ``plan``, or a function ``run`` that reduces the arrays itself.

    ``refusal(ctx)`` returns why arrays on these contexts cannot be given, or "". Every algorithm
    takes every dtype of a collective. ``run(lists, op)`` is given the lists of a bucket;
    ``prepare(lists, op)`` returns a function that does to these lists what ``run`` does, faster.
    ``reduce(lists, root, op)`` and ``broadcast(lists, root)`` may be given, too. Otherwise both
    follow the plan's hops towards the root; without a plan a reduce gives all devices the sum, and
    a broadcast follows a tree.
    """

    name: str
    plan: Callable[[int], list[Hop]] | None = None
    run: Callable[..., Any] | None = None
    refusal: Callable[[Sequence[Any]], str] = lambda ctx: ""
    prepare: Callable[..., Callable] | None = None
    reduce: Callable[..., Any] | None = None
    broadcast: Callable[..., Any] | None = None


ALGORITHMS: dict[str, Algorithm] = {}
"""Every :class:`Algorithm` that :func:`gluonpar.allreduce` accepts, by name."""


def register(name: str) -> Callable[[Callable], Callable]:
    """Return a decorator that adds the plan ``function(num_devices) -> list[Hop]``.

    Raises ValueError if the name is registered already; and what :func:`gluonpar.plans.plan.check`
    raises for 2, 3, 4 or 7 devices, such as TypeError for a function with ``yield``. A function
    that raises ValueError takes no such number. For other numbers the plan is checked when it is
    first carried out. docs/algorithms.md has an example.
    """

    def add(plan: Callable) -> Callable:
        for num_devices in (2, 3, 4, 7):
            try:
                hops = made(plan, num_devices)
            except ValueError:
                continue
            check(hops, num_devices)
        _add(Algorithm(name, plan=plan))
        return plan

    return add


def register_executor(name: str, **fields: Any) -> Callable[[Callable], Callable]:
    """Return a decorator that adds ``function(lists, op)``, which reduces in place.

    ``lists`` holds lists with one array per device, all on the same contexts and of one dtype;
    ``op`` is 'sum', 'max' or 'min' (a mean is a sum of scaled copies). ``fields`` are further
    fields of the :class:`Algorithm`. Raises as :func:`register` does.
    """

    def add(run: Callable) -> Callable:
        _add(Algorithm(name, run=run, **fields))
        return run

    return add


def named(name: str) -> Algorithm:
    """Return the algorithm ``name``. Raises ValueError, with all names, if it is not registered."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}")
    return ALGORITHMS[name]


def hops(name: str, num_devices: int) -> list[Hop]:
    """Return the plan of the algorithm ``name`` for ``num_devices``.

    Raises ValueError for an unknown algorithm or one without a plan, or ``num_devices`` below 1.
    """
    plan = named(name).plan
    if plan is None:
        raise ValueError(f"algorithm must be one with a plan, such as 'ring', got {name!r}")
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, got {num_devices}")
    return made(plan, num_devices)


def _add(algorithm: Algorithm) -> None:
    if algorithm.name in ALGORITHMS:
        raise ValueError(f"algorithm name must be new, got {algorithm.name!r}, which is registered")
    ALGORITHMS[algorithm.name] = algorithm


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
    return Trace(algorithm, num_devices, tuple(hops(algorithm, num_devices)))


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
