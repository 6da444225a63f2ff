"""The mean of K arrays, finite wherever it can be represented, although their sum may overflow.

Every value is multiplied by the largest power of two s <= 1 / K before values are added, and the
sum is divided by s K. No sum of scaled values is larger than the largest value, and scaling by a
power of two changes no digit: the result has the bits of sum / K, if no value is so small (1e-38 K
in float32) that it loses digits. float16 ends at 6e-8, so its mean is computed in float32.
"""

from __future__ import annotations

from typing import Sequence

import mxnet as mx
import numpy as np


def dtype(given: np.dtype) -> np.dtype:
    """Return the dtype in which the mean of arrays of dtype ``given`` is computed."""
    return np.promote_types(given, "float32")


def factors(count: int) -> tuple[float, float]:
    """Return s and s K, by which values are multiplied and their sum is divided.

    >>> factors(3), factors(4)
    ((0.25, 0.75), (0.25, 1.0))
    """
    scale = 0.5 ** (count - 1).bit_length()
    return scale, count * scale


def scaled(arrays: Sequence[mx.nd.NDArray], count: int) -> list[mx.nd.NDArray]:
    """Return new arrays whose sum :func:`write` makes the mean of ``count`` arrays."""
    scale, _ = factors(count)
    return [array.astype(dtype(array.dtype), copy=False) * scale for array in arrays]


def write(total: mx.nd.NDArray, count: int, targets: Sequence[mx.nd.NDArray]) -> None:
    """Write to ``targets`` the mean of ``count`` arrays, of which ``total`` is the scaled sum."""
    result = (total / factors(count)[1]).astype(targets[0].dtype, copy=False)
    for target in targets:
        result.copyto(target)
