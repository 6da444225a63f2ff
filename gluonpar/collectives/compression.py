"""Sums of float16 copies: half the bytes are sent, and half the digits kept."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx

from gluonpar.collectives.bucket import allreduce_many


def allreduce_as_float16(
    lists: Sequence[Sequence[mx.nd.NDArray]], algorithm: str | None = None
) -> None:
    """:func:`allreduce_many` in place, with what is exchanged in float16 and added in float32.

    Each value and each sum is rounded to 11 binary digits; beyond 65504 it becomes infinite. Holds
    copies of half the size while it runs.
    """
    halves = [[array.astype("float16") for array in data] for data in lists]
    allreduce_many(halves, algorithm, accumulate="float32")
    for data, sums in zip(lists, halves):
        for array, total in zip(data, sums):
            total.astype(array.dtype).copyto(array)
