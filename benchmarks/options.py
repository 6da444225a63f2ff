"""Types of options that take several values."""

from __future__ import annotations

from typing import Any, Callable

from gluonpar.diagnostics.harness import at_least


def several(kind: Callable[[str], Any]) -> Callable[[str], list]:
    """Return an argparse type for comma-separated values of this type, without repetitions."""
    return lambda argument: list(dict.fromkeys(map(kind, argument.split(","))))


integers = several(at_least(1))
