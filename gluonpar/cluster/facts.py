"""What ranks compare where they meet: values, by name."""

from __future__ import annotations

import numbers
from typing import Any, Dict, Sequence

import numpy as np

Facts = Dict[str, Any]

_MOST_NAMED = 3  # differences in one error


def encoded(value: Any) -> str:
    """Return a text that is the same for values that are equal in Python, and for NaN.

    It does not tell types of numbers apart (8, 8.0, ``np.int64(8)``), nor lists from tuples.

    >>> encoded({"size": np.int64(8), "shape": [2, 0.5]}) == encoded({"shape": (2, 0.5), "size": 8})
    True
    """
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{encoded(k)}:{encoded(value[k])}' for k in value))}}}"
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
    first, *others = of_ranks
    for rank, theirs in enumerate(others, 1):
        different = [
            f"{name} is {_shown(theirs, name)} on rank {rank} and {_shown(first, name)} on rank 0"
            for name in {**first, **theirs}
            if _text(theirs, name) != _text(first, name)
        ]
        if different:
            more = f"; and {len(different) - _MOST_NAMED} more" if different[_MOST_NAMED:] else ""
            raise ValueError(
                f"rank {rank} cannot train with the others: "
                f"{'; '.join(different[:_MOST_NAMED])}{more} ({call}). Start all ranks with the "
                "same arguments, software and data, and do the same on all"
            )


def _text(facts: Facts, name: str) -> str:
    return encoded(facts[name]) if name in facts else ""


def _shown(facts: Facts, name: str) -> str:
    return repr(facts[name]) if name in facts else "not given"
