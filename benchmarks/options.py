"""Types of options that take several values."""

from __future__ import annotations

import argparse
from typing import Any, Callable, Collection

from gluonpar.diagnostics.harness import at_least


def several(kind: Callable[[str], Any]) -> Callable[[str], list]:
    """Return an argparse type for comma-separated values of this type, without repetitions."""
    return lambda argument: list(dict.fromkeys(map(kind, argument.split(","))))


integers = several(at_least(1))


def one_of(known: Collection[str]) -> Callable[[str], list]:
    """Return an argparse type for comma-separated names out of ``known``, without repetitions."""

    def name(argument: str) -> str:
        if argument.strip() not in known:
            raise argparse.ArgumentTypeError(f"got {argument!r}; choose from {', '.join(known)}")
        return argument.strip()

    return several(name)
