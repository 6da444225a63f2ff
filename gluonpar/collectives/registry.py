"""The all-reduce algorithms by name, and the decorators that register one. Pure Python."""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple

from gluonpar.collectives.plan import Hop


class Algorithm(NamedTuple):
    """An all-reduce algorithm: a plan (:func:`register`) or :func:`register_executor`'s ``run``."""

    name: str
    plan: Callable[[int], list[Hop]] | None = None
    run: Callable[..., Any] | None = None
    reduce: Callable[..., Any] | None = None
    broadcast: Callable[..., Any] | None = None
    takes_buckets: bool = False


ALGORITHMS: dict[str, Algorithm] = {}
"""Every :class:`Algorithm` that :func:`gluonpar.allreduce` accepts, by name."""


def register(name: str) -> Callable[[Callable], Callable]:
    """Return a decorator that adds the plan ``function(num_devices) -> list[Hop]``.

    The plan must leave the sum of every chunk on every device, which
    :func:`gluonpar.collectives.plan.contributions` computes. Raises ValueError if the name is
    registered already.

    >>> @register("chain")
    ... def chain(num_devices):
    ...     last = num_devices - 1
    ...     down = [Hop(i, i, i + 1, 0, reduce=True) for i in range(last)]
    ...     up = [Hop(last + i, last - i, last - i - 1, 0, reduce=False) for i in range(last)]
    ...     return down + up
    >>> named("chain").plan is chain
    True
    >>> del ALGORITHMS["chain"]
    """
    return functools.partial(_add, name, "plan")


def register_executor(
    name: str,
    reduce: Callable | None = None,
    broadcast: Callable | None = None,
    takes_buckets: bool = False,
) -> Callable[[Callable], Callable]:
    """Return a decorator that adds ``function(lists, op, accumulate)``, which reduces in place.

    ``lists`` holds lists with one array per device, all on the same contexts and of one dtype: one
    list, or with ``takes_buckets`` any number, which are otherwise copied into one array per device
    and back. The other arguments are those of :func:`gluonpar.allreduce`. ``reduce(lists, root, op,
    accumulate)`` and ``broadcast(lists, root)``, if given, do that; otherwise all devices get the
    sum, and arrays are broadcast by a tree. Raises as :func:`register` does.
    """
    more = {"reduce": reduce, "broadcast": broadcast, "takes_buckets": takes_buckets}
    return functools.partial(_add, name, "run", **more)


def named(name: str) -> Algorithm:
    """Return the algorithm ``name``. Raises ValueError, with all names, if it is not registered."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}")
    return ALGORITHMS[name]


def _add(name: str, kind: str, function: Callable, **more: Any) -> Callable:
    if name in ALGORITHMS:
        raise ValueError(f"algorithm name must be new, got {name!r}, which is registered")
    ALGORITHMS[name] = Algorithm(name, **{kind: function}, **more)
    return function
