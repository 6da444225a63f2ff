"""Which algorithm is taken if the caller names none, and why."""

from __future__ import annotations

from typing import NamedTuple

from gluonpar.collectives.checks import Kind

SMALL_BYTES = 1 << 16


class Choice(NamedTuple):
    """An algorithm's name and the reason in words; printed, it is a sentence."""

    algorithm: str
    why: str

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.why}"


def choose(kind: Kind) -> Choice:
    """By where the arrays are and by their bytes. Only the first rule has been measured.

    The rules for GPUs follow from the algorithms' cards (docs/algorithms.md) and wait for a
    measurement.
    """
    if not any("gpu" in context.device_type for context in kind.ctx):
        return ON_THE_HOST
    if len(kind.ctx) == 2:
        return Choice("star", "with two devices there is nothing to share out")
    if kind.num_bytes <= SMALL_BYTES:
        return Choice("tree", f"{kind.num_bytes} bytes a device: the fewest steps win, not bytes")
    return Choice("balanced", f"{kind.num_bytes} bytes a device: every device sends and sums alike")


ON_THE_HOST = Choice("host", "all arrays are in the host's memory, so it can sum them in place")
