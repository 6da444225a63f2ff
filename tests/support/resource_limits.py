"""A limit on the memory that a block of code may take."""

from __future__ import annotations

import contextlib
import resource
from typing import Iterator


@contextlib.contextmanager
def memory_limit(num_bytes: int = 256 << 20) -> Iterator[None]:
    """Let this process reserve at most ``num_bytes`` more address space; MemoryError beyond."""
    with open("/proc/self/statm", encoding="ascii") as pages:
        used = int(pages.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
