"""The all-reduce algorithms by name: a decorator that registers a plan, and hops as a table."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import Callable, NamedTuple

from gluonpar.plans.plan import Hop, by_step, check, chunks_sent, made, num_chunks

Plan = Callable[[int], "list[Hop]"]

ALGORITHMS: dict[str, Plan | None] = {}
"""The plan of every algorithm that :func:`gluonpar.allreduce` accepts, by name.

A plan is a function from the number of devices to a list of :class:`Hop`; None stands for an
algorithm without one (:func:`gluonpar.collectives.register_executor`).
"""


def register(name: str) -> Callable[[Callable], Callable]:
    """Return a decorator that adds the plan ``function(num_devices) -> list[Hop]``.

    Raises ValueError if the name is registered already; and what :func:`gluonpar.plans.plan.check`
    raises for 2, 3, 4 or 7 devices, such as TypeError for a function with ``yield``. A function
    that raises ValueError takes no such number. For other numbers the plan is checked when it is
    first carried out. docs/algorithms.md has an example.
    """

    def decorate(plan: Plan) -> Plan:
        for num_devices in (2, 3, 4, 7):
            try:
                hops = made(plan, num_devices)
            except ValueError:
                continue
            check(hops, num_devices)
        add(name, plan)
        return plan

    return decorate


def add(name: str, plan: Plan | None) -> None:
    """Add an algorithm. Raises ValueError if the name is registered already."""
    if name in ALGORITHMS:
        raise ValueError(f"algorithm name must be new, got {name!r}, which is registered")
    ALGORITHMS[name] = plan


def plan_of(name: str) -> Plan | None:
    """Return the plan of the algorithm ``name``, or None for an algorithm without a plan.

    Raises ValueError, with all names, if it is not registered.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}")
    return ALGORITHMS[name]


def hops(name: str, num_devices: int) -> list[Hop]:
    """Return the plan of the algorithm ``name`` for ``num_devices``.

    Raises ValueError for an unknown algorithm or one without a plan, or ``num_devices`` below 1.
    """
    plan = plan_of(name)
    if plan is None:
        raise ValueError(f"algorithm must be one with a plan, such as 'ring', got {name!r}")
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, got {num_devices}")
    return made(plan, num_devices)


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
