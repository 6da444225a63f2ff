"""The all-reduce algorithms by name, and the decorators that register one. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from gluonpar.collectives.plan import Hop


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce algorithm: either a plan of hops or an executor of its own.

    ``plan(num_devices)`` returns the hops; ``run(lists, op, accumulate)`` reduces several lists of
    arrays in place. The other one is None.
    """

    name: str
    plan: Callable[[int], list[Hop]] | None = None
    run: Callable[..., Any] | None = None


ALGORITHMS: dict[str, Algorithm] = {}
"""Every :class:`Algorithm` that :func:`gluonpar.allreduce` accepts, by name.

:func:`register` and :func:`register_executor` add to it; :func:`named` looks a name up.
"""


def register(name: str) -> Callable[[Callable], Callable]:
    """Return a decorator that adds the plan ``function(num_devices) -> list[Hop]``.

    The plan must leave the sum of every chunk on every device: ``trace(name, K)`` shows its hops,
    and :func:`gluonpar.collectives.plan.contributions` computes what each device ends with. Raises
    ValueError if the name is registered already.

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
    return _adder(name, "plan")


def register_executor(name: str) -> Callable[[Callable], Callable]:
    """Return a decorator that adds ``function(lists, op, accumulate)``, which reduces in place.

    ``lists`` holds lists with one array per device, all on the same contexts and of one dtype;
    ``op`` is 'sum', 'mean', 'max' or 'min'; ``accumulate`` is None or 'float32'. Raises ValueError
    if the name is registered already.
    """
    return _adder(name, "run")


def named(name: str) -> Algorithm:
    """Return the algorithm ``name``. Raises ValueError, with all names, if there is none."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}")
    return ALGORITHMS[name]


def _adder(name: str, kind: str) -> Callable[[Callable], Callable]:
    def add(function: Callable) -> Callable:
        if name in ALGORITHMS:
            raise ValueError(f"algorithm name must be new, got {name!r}, which is registered")
        ALGORITHMS[name] = Algorithm(name, **{kind: function})
        return function

    return add
