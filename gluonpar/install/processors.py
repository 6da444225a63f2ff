"""How many processors this process may use."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # no such file, or not readable: nothing is known
        return ""


def usable() -> int:
    """Return how many processors' time this process gets: by its affinity and a cgroup's quota."""
    allowed, granted = len(os.sched_getaffinity(0)), quota()
    return allowed if granted is None else max(1, min(allowed, math.ceil(granted)))


@functools.lru_cache(None)
def quota(root: Path = Path("/")) -> float | None:
    """Return how many processors' time the control groups (v2 or v1) grant; None: no limit."""
    quotas = []
    lines = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    groups = {Path(line[2].lstrip("/")) for line in lines if len(line) == 3}
    for group in {Path()}.union(groups, *(path.parents for path in groups)):
        limit = _read(root / "sys/fs/cgroup" / group / "cpu.max").split()
        v1 = root / "sys/fs/cgroup/cpu" / group
        limit = limit or [_read(v1 / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if len(limit) == 2 and all(number.isdecimal() for number in limit) and int(limit[1]):
            quotas.append(int(limit[0]) / int(limit[1]))
    return min(quotas, default=None)
