"""What all ranks must have in common before they train as one."""

from __future__ import annotations

from typing import Any, Callable, TypeVar

from gluonpar.cluster.exchange import gather

_Result = TypeVar("_Result")


def agree(facts: dict[str, Any]) -> None:
    """Raise ValueError, on all ranks, unless all bring equal ``facts``; it names who differs.

    Waits for all ranks. ``facts`` are names and what can be pickled and compared.
    """
    first, *others = gather(facts)
    for rank, theirs in enumerate(others, 1):
        differences = [
            f"{name} is {theirs.get(name)!r} on rank {rank} and {first.get(name)!r} on rank 0"
            for name in {**first, **theirs}
            if theirs.get(name) != first.get(name)
        ]
        if differences:
            raise ValueError(
                f"rank {rank} cannot train with the others: {'; '.join(differences)}. Start all "
                "ranks with the same arguments, software and data"
            )


def together(function: Callable[[], _Result]) -> _Result:
    """``function()`` on every rank; ValueError or FileNotFoundError of one is raised on all.

    Waits for all ranks. An error that not all have names the rank it came from.
    """
    result, failure = None, None
    try:
        result = function()
    except (ValueError, FileNotFoundError) as error:
        failure = error
    words = gather(None if failure is None else (type(failure), str(failure)))
    failed = [rank for rank, word in enumerate(words) if word is not None]
    if not failed:
        return result
    if set(words) == {words[0]}:
        raise failure
    kind, text = words[failed[0]]
    raise kind(f"rank {failed[0]}: {text}") from failure
