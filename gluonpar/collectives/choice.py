"""Which algorithm is taken if the caller names none, and why."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import mxnet as mx

from gluonpar import memory

SMALL_BYTES = 1 << 16


class Choice(NamedTuple):
    """An algorithm's name and the reason in words; printed, it is a sentence."""

    algorithm: str
    why: str

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.why}"


def choose(data: Sequence[mx.nd.NDArray]) -> Choice:
    """By where the arrays are and by their bytes. Only the first rule has been measured.

    The rules for GPUs follow from the algorithms' cards (docs/algorithms.md) and wait for a
    measurement.
    """
    if not any("gpu" in array.context.device_type for array in data):
        return Choice("host", "all arrays are in the host's memory, so it can sum them in place")
    num_bytes = memory.num_bytes(data[0])
    if len(data) == 2:
        return Choice("star", "with two devices there is nothing to share out")
    if num_bytes <= SMALL_BYTES:
        return Choice("tree", f"{num_bytes} bytes a device: the fewest steps win, not bytes")
    return Choice("balanced", f"{num_bytes} bytes a device: every device sends and sums alike")
