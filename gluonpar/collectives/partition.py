"""How n things are cut into k parts. Pure Python."""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Real
from typing import Sequence


def sizes(n: int, k: int, weights: Sequence[float] | None = None) -> list[int]:
    """Sizes of ``k`` parts of ``n`` things: they differ by at most one, and the larger come first.

    With ``weights``, one positive number a part, sizes are proportional to them: n * weight / sum,
    rounded down, and what is left goes to the largest remainders, one each, of equal ones to the
    first (Hamilton's method). No part is empty while n >= k: an empty one gets one from the part
    that has most above its due. With n < k weights do not count. Raises ValueError for n < 0, k < 1
    and weights that are not k positive finite numbers.

    >>> sizes(10, 4)
    [3, 3, 2, 2]
    >>> sizes(2, 3)
    [1, 1, 0]
    >>> sizes(10, 3, [1, 2, 1])
    [3, 5, 2]
    """
    if n < 0 or k < 1:
        raise ValueError(f"cannot cut {n} things into {k} parts; need n >= 0 and k >= 1")
    if weights is not None:
        check_weights(weights, k)
        if n >= k:
            return _proportional(n, [Fraction(float(weight)) for weight in weights])
    least, larger = divmod(n, k)
    return [least + (i < larger) for i in range(k)]


def slices(n: int, k: int, weights: Sequence[float] | None = None) -> list[slice]:
    """The same parts as consecutive slices that cover ``range(n)``; raises as :func:`sizes`.

    >>> slices(5, 2)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    parts, start = [], 0
    for size in sizes(n, k, weights):
        parts.append(slice(start, start + size))
        start += size
    return parts


def check_weights(weights: Sequence[float], k: int) -> None:
    """Raise ValueError unless ``weights`` are ``k`` positive finite numbers."""
    shown = f"weights={list(weights)}"
    if len(weights) != k:
        raise ValueError(f"{shown}: {len(weights)} of them for {k} devices; give one a device")
    for weight in weights:
        if not isinstance(weight, Real) or not 0 < weight < math.inf:
            raise ValueError(
                f"{shown}: {weight!r} is no speed; give positive finite numbers, such as 1 and 2"
            )


def _proportional(n: int, weights: list[Fraction]) -> list[int]:
    """Fractions, so that equal remainders are equal and no rounding decides."""
    due = [n * weight / sum(weights) for weight in weights]
    parts = [math.floor(share) for share in due]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - due[i])
    for i in by_remainder[: n - sum(parts)]:
        parts[i] += 1
    while 0 in parts:
        above = [size - share if size > 1 else -math.inf for size, share in zip(parts, due)]
        parts[above.index(max(above))] -= 1
        parts[parts.index(0)] = 1
    return parts


def balance(weights: list[int], k: int) -> list[int]:
    """For each of ``weights``, which of ``k`` parts takes it, so that the parts weigh about alike.

    The heaviest goes first, each to the part that is lightest by then (Graham 1969).

    >>> balance([1, 5, 3, 3], 2)
    [0, 0, 1, 1]
    """
    parts, load = [0] * len(weights), [0] * k
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        parts[i] = load.index(min(load))
        load[parts[i]] += weights[i]
    return parts
