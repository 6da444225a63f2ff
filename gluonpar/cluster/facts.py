"""What ranks compare where they meet: values, by name."""

from __future__ import annotations

import collections
import numbers
import operator
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

Facts = Dict[str, Any]

UPDATES = "updates"  # the name of the fact whose value is an Updates
_MOST_NAMED = 3  # an error names so many differences


class Updates(List[Tuple[str, Dict[str, Any]]]):
    """Names of what was updated, each with the floats, or tuples of floats, that an update used."""


def encoded(value: Any) -> str:
    """Return a text that is the same for values that are equal in Python, and for NaN.

    It does not tell types of numbers apart (8, 8.0, ``np.int64(8)``), lists from tuples, and what a
    dict does not have from None.

    >>> encoded({"size": np.int64(8), "shape": [2, 0.5]}) == encoded({"shape": (2, 0.5), "size": 8})
    True
    """
    if type(value) is str:  # most values are; this is faster than what follows
        return repr(value)
    if isinstance(value, Updates):  # ranks may update parameters in different orders
        return repr(sorted(value, key=operator.itemgetter(0)))
    if isinstance(value, dict):
        items = [f"{encoded(k)}:{encoded(v)}" for k, v in value.items() if v is not None]
        return f"{{{','.join(sorted(items))}}}"
    if isinstance(value, (list, tuple)):
        return f"({','.join(map(encoded, value))})"
    if isinstance(value, (numbers.Integral, np.bool_)):
        return str(int(value))
    if isinstance(value, numbers.Real):
        number = float(value)
        return str(int(number)) if number.is_integer() else number.hex()
    return repr(value)


def compare(of_ranks: Sequence[Facts], call: str) -> None:
    """Raise ValueError, naming what differs, unless all ranks have the same facts."""
    first, *others = map(_flat, of_ranks)
    for rank, facts in enumerate(others, 1):
        different = [
            f"{name} is {facts.get(name)!r} on rank {rank} and {first.get(name)!r} on rank 0"
            for name in {**first, **facts}
            if encoded(facts.get(name)) != encoded(first.get(name))
        ]
        if different:
            more = f"; and {len(different) - _MOST_NAMED} more" if different[_MOST_NAMED:] else ""
            raise ValueError(
                f"rank {rank} cannot train with the others: {'; '.join(different[:_MOST_NAMED])}"
                f"{more} ({call}). Start all ranks with the same arguments, software and data, and "
                "do the same on all"
            )


def _flat(facts: Facts) -> Facts:
    """Return ``facts`` with each number of an update as a fact, such as "lr of dense0_weight"."""
    flat = dict(facts)
    times: collections.Counter[str] = collections.Counter()
    for name, used in flat.pop(UPDATES, ()):
        times[name] += 1
        of = f"{name} (update {times[name]})" if times[name] > 1 else name
        flat.update({f"{key} of {of}": number for key, number in used.items()})
    return flat
