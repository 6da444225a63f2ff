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


def factors(count: int) -> tuple[float, float]:
    """Return s and s K, by which values are multiplied and their sum is divided.

    >>> factors(3), factors(4)
    ((0.25, 0.75), (0.25, 1.0))
    """
    scale = 0.5 ** (count - 1).bit_length()
    return scale, count * scale


def scaled(arrays: Sequence[mx.nd.NDArray], count: int) -> list[mx.nd.NDArray]:
    """Return new arrays, of float32 or wider, whose sum :func:`of` makes the mean of ``count``."""
    scale, _ = factors(count)
    dtypes = [np.promote_types(array.dtype, "float32") for array in arrays]
    return [array.astype(d, copy=False) * scale for array, d in zip(arrays, dtypes)]


def of(total: mx.nd.NDArray, count: int) -> mx.nd.NDArray:
    """Return the mean of ``count`` arrays, of which ``total`` is the scaled sum."""
    return total / factors(count)[1]
