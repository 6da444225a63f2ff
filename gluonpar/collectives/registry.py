"""The algorithms by name, and the decorators that add one. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from gluonpar.collectives.plan import Hop


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce algorithm: a plan of hops, or an executor of its own.

    ``plan(num_devices)`` lists the hops; ``run(lists, op, accumulate)`` is given several lists of
    arrays at once. One of the two is None. ``description`` is the first line of the docstring.
    """

    name: str
    description: str
    plan: Callable[[int], list[Hop]] | None = None
    run: Callable[..., Any] | None = None


ALGORITHMS: dict[str, Algorithm] = {}
"""By name every :class:`Algorithm` that :func:`gluonpar.allreduce` takes, as they were registered.

:func:`register` and :func:`register_executor` add to it, :func:`named` looks one up.
"""


def register(name: str) -> Callable[[Callable], Callable]:
    """Decorator: add the plan ``function(num_devices) -> list[Hop]`` as an algorithm.

    It must end with the sum of every chunk on every device; ``trace(name, K)`` and the package's
    own laws (tests/collectives/test_plans.py) help to see that it does. ValueError: the name is taken.

    >>> @register("chain")
    ... def chain(num_devices):
    ...     last = num_devices - 1
    ...     there = [Hop(i, i, i + 1, 0, reduce=True) for i in range(last)]
    ...     back = [Hop(last + i, last - i, last - i - 1, 0, reduce=False) for i in range(last)]
    ...     return there + back
    >>> named("chain").plan is chain
    True
    >>> del ALGORITHMS["chain"]
    """

    def add(plan: Callable[[int], list[Hop]]) -> Callable[[int], list[Hop]]:
        _add(Algorithm(name, _first_line(plan), plan=plan))
        return plan

    return add


def register_executor(name: str) -> Callable[[Callable], Callable]:
    """Decorator: add ``function(lists, op, accumulate)``, which reduces each list in place itself.

    ``lists`` holds lists of arrays, one array a device, all on the same contexts and of one dtype;
    ``op`` is 'sum', 'mean', 'max' or 'min'; ``accumulate`` is None or 'float32'. ValueError: the
    name is taken.
    """

    def add(run: Callable) -> Callable:
        _add(Algorithm(name, _first_line(run), run=run))
        return run

    return add


def named(name: str) -> Algorithm:
    """The algorithm ``name``; ValueError, with the names there are, for another."""
    if name not in ALGORITHMS:
        raise ValueError(f"no all-reduce algorithm {name!r}; there are: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def _add(algorithm: Algorithm) -> None:
    if algorithm.name in ALGORITHMS:
        raise ValueError(f"there is an all-reduce algorithm {algorithm.name!r} already")
    ALGORITHMS[algorithm.name] = algorithm


def _first_line(function: Callable) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]
