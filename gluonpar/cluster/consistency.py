"""Checks that all ranks make before they train together."""

from __future__ import annotations

import functools
import zlib
from typing import Any, Callable

import numpy as np

from gluonpar.cluster import process_collectives
from gluonpar.cluster.process_collectives import gather
from gluonpar.cluster.world import World


def check_equal(facts: dict[str, Any]) -> None:
    """Raise ValueError on all ranks if ``facts`` differ between ranks; it names the differences.

    Waits for all ranks. The values of ``facts`` must be picklable and comparable with ``==``.
    """
    _compare(gather(facts))


def check_equal_async(facts: dict[str, Any]) -> None:
    """:func:`check_equal` without waiting, for every step: an operator that compares checksums.

    If ``facts`` differ, it fails on all ranks, with :func:`check_equal`'s error, at the next wait
    for an array that was computed from a later exchange.
    """
    process_collectives.push(functools.partial(_compare_checksums, facts))


def _compare_checksums(facts: dict[str, Any], job: World) -> None:
    checksum = zlib.crc32(repr(facts).encode())
    pair = np.array([checksum, -checksum], np.int64)
    job.comm.Allreduce(job.mpi.IN_PLACE, pair, job.mpi.MAX)
    if pair[0] != -pair[1]:  # the largest is not the smallest
        _compare(job.comm.allgather(facts))


def _compare(facts: list[dict[str, Any]]) -> None:
    first, *others = facts
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


def together(function: Callable[[], Any]) -> Any:
    """Return ``function()``, unless it raises ValueError or FileNotFoundError on any rank.

    Then that error is raised on all ranks; it names the rank, unless all ranks have the same error.
    Waits for all ranks.
    """
    result = failure = None
    try:
        result = function()
    except (ValueError, FileNotFoundError) as error:
        failure = error
    failures = gather(None if failure is None else (type(failure), str(failure)))
    failed = [rank for rank, error in enumerate(failures) if error is not None]
    if not failed:
        return result
    if set(failures) == {failures[0]}:
        raise failure
    kind, message = failures[failed[0]]
    raise kind(f"rank {failed[0]}: {message}") from failure
