"""How n things are cut into k parts. Pure Python."""

from __future__ import annotations


def sizes(n: int, k: int) -> list[int]:
    """Sizes of ``k`` parts of ``n`` things: they differ by at most one, and the larger come first.

    >>> sizes(10, 4)
    [3, 3, 2, 2]
    >>> sizes(2, 3)
    [1, 1, 0]
    """
    if n < 0 or k < 1:
        raise ValueError(f"cannot cut {n} things into {k} parts; need n >= 0 and k >= 1")
    least, larger = divmod(n, k)
    return [least + (i < larger) for i in range(k)]


def slices(n: int, k: int) -> list[slice]:
    """The same parts as consecutive slices that cover ``range(n)``.

    >>> slices(5, 2)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    parts, start = [], 0
    for size in sizes(n, k):
        parts.append(slice(start, start + size))
        start += size
    return parts
