"""What this process takes of the machine, as Linux tells it in /proc; zeros elsewhere."""

from __future__ import annotations

import contextlib
import os
import resource


def now() -> dict[str, int]:
    """Its resident memory in bytes, its threads, and its open file descriptors.

    >>> sorted(now())
    ['descriptors', 'resident_bytes', 'threads']
    """
    return {
        "resident_bytes": 1024 * status("VmRSS"),
        "threads": status("Threads"),
        "descriptors": descriptors(),
    }


def peak_bytes() -> int:
    """Most memory this process has had; getrusage would count its parent's before exec, too."""
    return 1024 * (status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def descriptors() -> int:
    """How many are open, without the one that is open to count them."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd")) - 1
    return 0


def status(name: str) -> int:
    """The number in a line of /proc/self/status, such as VmRSS, which is in KiB."""
    with contextlib.suppress(OSError), open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0
