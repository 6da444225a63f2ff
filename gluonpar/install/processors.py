"""The processors that this process may use, and who else uses them."""

from __future__ import annotations

import functools
import math
import os
import time
from pathlib import Path


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # there is no such file, or it cannot be read
        return ""


def usable() -> int:
    """Return how many processors' time this process gets by its affinity and a cgroup's quota."""
    allowed, granted = len(os.sched_getaffinity(0)), quota()
    return allowed if granted is None else max(1, min(allowed, math.ceil(granted)))


@functools.lru_cache(None)
def quota(root: Path = Path("/")) -> float | None:
    """Return how many processors' time the control groups grant; None if they set no limit.

    Version 2 has "150000 100000" or "max 100000" in a group's ``cpu.max``, version 1 the same two
    numbers in two files, with -1 for no limit. A group is also limited by the groups above it.
    """
    quotas, folder = [], root / "sys/fs/cgroup"
    lines = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    groups = {Path(line[2].lstrip("/")) for line in lines if len(line) == 3}
    for group in {Path()}.union(groups, *(path.parents for path in groups)):
        v1 = [_read(folder / "cpu" / group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        limit = _read(folder / group / "cpu.max").split() or v1
        if len(limit) == 2 and all(map(str.isdecimal, limit)) and int(limit[1]):
            quotas.append(int(limit[0]) / int(limit[1]))
    return min(quotas, default=None)


def _used() -> tuple[float, float, float]:
    """Return the time now, and the seconds computed here for all processes, and for this one."""
    names, seconds = {f"cpu{i}" for i in os.sched_getaffinity(0)}, 0
    for line in _read(Path("/proc/stat")).splitlines():
        name, *ticks = line.split()
        if name in names:
            user, nice, system, _, _, irq, softirq, steal = map(int, ticks[:8])
            seconds += user + nice + system + irq + softirq + steal
    return time.monotonic(), seconds / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


_START = _used()


def shared() -> str:
    """Return what other programs have used since the import, and a quota, or "" for neither."""
    elapsed, by_all, by_this_process = (now - then for now, then in zip(_used(), _START))
    others, notes = (by_all - by_this_process) / max(elapsed, 0.01), []
    if others > 0.3:  # some is always in use
        notes.append(f"other programs use {others:.1f} of {len(os.sched_getaffinity(0))}")
    granted = quota()
    if granted is not None and granted < len(os.sched_getaffinity(0)):
        notes.append(f"a cgroup's quota grants the time of {granted:g}")
    return ", ".join(notes)
