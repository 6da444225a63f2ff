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
    except OSError:  # no such file, or not readable: nothing is known
        return ""


def usable() -> int:
    """Return how many processors' time this process gets: by its affinity and a cgroup's quota."""
    allowed, granted = len(os.sched_getaffinity(0)), quota()
    return allowed if granted is None else max(1, min(allowed, math.ceil(granted)))


@functools.lru_cache(None)
def vector_floats(root: Path = Path("/")) -> int:
    """Return how many float32 numbers oneDNN computes on at once: 16 with AVX-512, else 8.

    The environment variable DNNL_MAX_CPU_ISA, which is oneDNN's, may forbid AVX-512.
    """
    limit = os.environ.get("DNNL_MAX_CPU_ISA", "ALL").upper()
    may = limit in ("", "ALL", "DEFAULT") or limit.startswith("AVX512")
    return 16 if may and "avx512f" in _read(root / "proc/cpuinfo").split() else 8


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


def _used() -> tuple[float, float, float]:
    """Return the time, and how long these processors have computed for all and for this process."""
    names, seconds = {f"cpu{i}" for i in os.sched_getaffinity(0)}, 0
    for line in _read(Path("/proc/stat")).splitlines():
        name, *ticks = line.split()
        if name in names:
            user, nice, system, _, _, irq, softirq, steal = map(int, ticks[:8])
            seconds += user + nice + system + irq + softirq + steal
    return time.monotonic(), seconds / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


_START = _used()


def shared() -> str:
    """Return what other programs have used since the import, and a quota; "" if there is none."""
    elapsed, by_all, by_this_process = (now - then for now, then in zip(_used(), _START))
    others, notes = (by_all - by_this_process) / max(elapsed, 0.01), []
    if others > 0.3:  # less than that is always in use
        notes.append(f"other programs use {others:.1f} of {len(os.sched_getaffinity(0))}")
    granted = quota()
    if granted is not None and granted < len(os.sched_getaffinity(0)):
        notes.append(f"a cgroup's quota grants the time of {granted:g}")
    return ", ".join(notes)
