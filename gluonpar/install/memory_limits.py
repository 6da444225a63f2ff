"""Checks for memory before the libraries need it, and recognizes its shortage in their errors.

Where memory is short (seen under ``ulimit -v``), MXNet 1.9.1 raises an error if an array is too
large, but crashes or hangs if a thread cannot be started or oneDNN gets no workspace. So callers
first check that the memory that every run needs can be allocated.
"""

from __future__ import annotations

import errno
import mmap
import re

MB = 1 << 20

# Words in messages of MXNet, NumPy, Python and CUDA when memory or a thread's stack is lacking.
_MESSAGES = re.compile(
    r"bad_?alloc|failed to allocate|unable to allocate|allocation failed|out of memory|MemoryError|"
    r"cannot allocate memory|could not create a memory object|can't start new thread|"
    r"resource temporarily unavailable",
    re.IGNORECASE,
)


def require(purpose: str, num_bytes: int) -> None:
    """Raise MemoryError unless this process can allocate ``num_bytes`` more; keep none of them.

    This takes microseconds, as no page is touched. ``purpose`` completes "cannot allocate ... for".
    """
    try:
        mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        about = f"about {num_bytes // MB} MB"
        raise MemoryError(f"cannot allocate {about} for {purpose}") from error


def shortage(error: BaseException) -> str | None:
    """Return the line of ``error`` that tells of a lack of memory (or of threads), or None."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, MemoryError):
        return lines[-1] if lines else "Python could not allocate an object"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return lines[-1]
    if isinstance(error, RuntimeError):  # MXNetError is one; it may quote a traceback
        short = [line for line in lines if _MESSAGES.search(line)]
        return re.sub(r"^(mxnet\.base\.)?MXNetError: ", "", short[-1]) if short else None
    return None
