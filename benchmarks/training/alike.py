"""Whether all devices have the same parameters, to the bit. NumPy only."""

from __future__ import annotations

from typing import Sequence

import numpy as np


def compare(replicas: Sequence[Sequence[np.ndarray]]) -> dict[str, int]:
    """Counts over ``replicas``, a list a device of the same parameters' values.

    Keys: "devices", "parameters" of one device, "differing", which have on some device other bits
    than on the first, and "not_finite", which have a NaN or an infinity on some device.

    >>> one, other = np.float32([0, 1]), np.float32([-0.0, 1])
    >>> compare([[one, one], [one, other]])
    {'devices': 2, 'parameters': 2, 'differing': 1, 'not_finite': 0}
    """
    copies = list(zip(*replicas))  # a tuple a parameter: its value on each device
    return {
        "devices": len(replicas),
        "parameters": len(copies),
        "differing": sum(any(_bits(v) != _bits(of[0]) for v in of[1:]) for of in copies),
        "not_finite": sum(not all(np.isfinite(v).all() for v in of) for of in copies),
    }


def _bits(value: np.ndarray) -> tuple:
    return value.dtype, value.shape, value.tobytes()
