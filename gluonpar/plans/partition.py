"""Cutting n items into k parts: of equal size, in proportion to weights, or of equal load."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate
from numbers import Real
from typing import Sequence


def sizes(n: int, k: int, weights: Sequence[float] | None = None) -> list[int]:
    """Return the sizes of ``k`` parts of ``n`` items: they differ by at most one, larger first.

    With ``weights``, one positive number per part, sizes are proportional to them: n * weight /
    sum, rounded down; the remaining items go to the largest remainders, one each, ties to the first
    (Hamilton's method). A part that would be empty takes an item from the part that exceeds its
    exact share most. With n < k weights have no effect. Raises ValueError if n < 0, if k < 1, or if
    weights are not k positive finite numbers.

    >>> sizes(10, 4)
    [3, 3, 2, 2]
    >>> sizes(2, 3)
    [1, 1, 0]
    >>> sizes(10, 3, [1, 2, 1])
    [3, 5, 2]
    """
    if n < 0 or k < 1:
        raise ValueError(f"n must be at least 0 and k at least 1, got n={n} and k={k}")
    if weights is not None:
        check_weights(weights, k)
        if n >= k:
            return _proportional(n, [Fraction(float(weight)) for weight in weights])
    least, larger = divmod(n, k)
    return [least + (i < larger) for i in range(k)]


def slices(n: int, k: int, weights: Sequence[float] | None = None) -> list[slice]:
    """Return the parts of :func:`sizes` as consecutive slices that cover ``range(n)``.

    >>> slices(5, 2)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    parts = sizes(n, k, weights)
    return [slice(stop - size, stop) for size, stop in zip(parts, accumulate(parts))]


def check_weights(weights: Sequence[float], k: int) -> None:
    """Raise ValueError unless ``weights`` are ``k`` positive finite numbers."""
    wrong = [each for each in weights if not isinstance(each, Real) or not 0 < each < math.inf]
    if wrong or len(weights) != k:
        must = f"must be {k} positive finite numbers, one per device; try 1 and 2"
        raise ValueError(f"weights={list(weights)} {must}")


def _proportional(n: int, weights: list[Fraction]) -> list[int]:
    """Sizes by Hamilton's method, in fractions: no rounding error decides between equal weights."""
    exact = [n * weight / sum(weights) for weight in weights]
    parts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in by_remainder[: n - sum(parts)]:
        parts[i] += 1
    while 0 in parts:
        excess = [size - share if size > 1 else -math.inf for size, share in zip(parts, exact)]
        parts[excess.index(max(excess))] -= 1
        parts[parts.index(0)] = 1
    return parts


def balance(weights: list[int], k: int) -> list[int]:
    """Return for each weight the number of its part, so that the ``k`` parts have similar sums.

    From the heaviest on, each goes to the part with the smallest sum so far (Graham 1969).

    >>> balance([1, 5, 3, 3], 2)
    [0, 0, 1, 1]
    """
    parts, load = [0] * len(weights), [0] * k
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        parts[i] = load.index(min(load))
        load[parts[i]] += weights[i]
    return parts
