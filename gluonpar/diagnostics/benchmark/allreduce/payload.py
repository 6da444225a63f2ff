"""Whether an all-reduce is right: numbers that differ everywhere, and whose sums are exact."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx
import numpy as np

from gluonpar.diagnostics.benchmark import measure
from gluonpar.diagnostics.benchmark.allreduce.candidates import COMBINE, once


def count_wrong(
    candidates: Sequence[measure.Candidate], arrays: Sequence[mx.nd.NDArray], op: str
) -> dict[str, int]:
    """Each candidate run once, untimed, on :func:`payload`: wrong elements over all devices."""
    values = payload(len(arrays), arrays[0].size, np.dtype(arrays[0].dtype))
    right = values[0].copy()
    for value in values[1:]:
        COMBINE[op](right, value, out=right)
    if op == "mean":
        right /= len(arrays)
    wrong = {}
    for candidate in candidates:
        for array, value in zip(arrays, values):
            array[:] = value
        once(candidate)
        wrong[candidate.name] = sum(
            int(np.count_nonzero(array.asnumpy() != right)) for array in arrays
        )
    return wrong


def payload(num_devices: int, size: int, dtype: np.dtype) -> list[np.ndarray]:
    """One array a device, counting up through all of them, so small that sums are exact.

    Every cell is unique as far as that allows; beyond, the count starts again after a prime number,
    which no chunk and no array is a multiple of: a misplaced or repeated chunk changes the sum.

    >>> [array.tolist() for array in payload(2, 3, np.dtype("int8"))]
    [[0, 1, 2], [3, 4, 5]]
    """
    exact = {2: 1 << 11, 4: 1 << 24, 8: 1 << 24}  # by itemsize; int32 and int64 could take more
    limit = exact.get(dtype.itemsize) or np.iinfo(dtype).max
    period = max(2, limit // num_devices)
    while period > 2 and (size % period == 0 or not _is_prime(period)):
        period -= 1
    counts = (np.arange(i * size, (i + 1) * size) % period for i in range(num_devices))
    return [count.astype(dtype) for count in counts]


def _is_prime(number: int) -> bool:
    return all(number % i for i in range(2, int(number**0.5) + 1))
