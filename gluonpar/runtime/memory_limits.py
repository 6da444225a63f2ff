"""Room in memory: asked for before the libraries need it, and said in words when there is none.

Short of memory, MXNet 1.9.1 raises an error where an array is too large, and crashes or hangs where
a thread cannot be started or oneDNN gets no workspace (seen under ``ulimit -v``). So the room for
what every run needs is asked for beforehand. The kernel's killer of processes asks nobody: whoever
it kills is gone without a word (137 in a shell).
"""

from __future__ import annotations

import errno
import mmap
import re
import resource

MB = 1 << 20

LIBRARY_ADDRESSES = 500 * MB  # of MXNet's library itself; with less, loading it crashed

# What MXNet's, NumPy's, Python's and CUDA's errors say when memory is short, or room for a thread.
_WORDS = re.compile(
    r"bad_?alloc|failed to allocate|unable to allocate|allocation failed|out of memory|MemoryError|"
    r"cannot allocate memory|could not create a memory object|can't start new thread|"
    r"resource temporarily unavailable",
    re.IGNORECASE,
)
_LIMITS = {"ulimit -v": resource.RLIMIT_AS, "ulimit -d": resource.RLIMIT_DATA}


class OutOfMemory(MemoryError):
    """There is no room for what is about to be done; the message says for what, and how much."""


def check(what: str, num_bytes: int, reserved_bytes: int = 0) -> None:
    """Raise OutOfMemory unless this process can have ``num_bytes`` more; nothing is kept of them.

    ``reserved_bytes`` is address space: stacks and heaps take more of it than they ever fill. Takes
    some microseconds, as no page is touched. ``what`` completes "there is no room for ...".

    >>> check("one byte more", 1)
    """
    for protection, size in ((mmap.PROT_READ | mmap.PROT_WRITE, num_bytes), (0, reserved_bytes)):
        if not size:
            continue
        try:
            mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, protection).close()
        except OSError as error:
            kind = "memory" if protection else "address space"
            raise OutOfMemory(
                f"there is no room for {what}, about {size // MB} MB of {kind}"
            ) from error


def shortage(error: BaseException) -> str | None:
    """What was short, in a line, if memory was (or a thread's stack); None for any other error.

    >>> shortage(MemoryError("Unable to allocate 3 GiB")), shortage(ValueError("bad_alloc"))
    ('Unable to allocate 3 GiB', None)
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, MemoryError):
        return lines[-1] if lines else "Python could not have the memory for an object"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return lines[-1]
    if isinstance(error, RuntimeError):  # MXNetError too, which may quote a traceback
        said = [line for line in lines if _WORDS.search(line)]
        return re.sub(r"^(mxnet\.base\.)?MXNetError: ", "", said[-1]) if said else None
    return None


def limits() -> str:
    """The limits on this process's memory, in words: "ulimit -v is 700 MB"; empty without any."""
    found = {name: resource.getrlimit(kind)[0] for name, kind in _LIMITS.items()}
    set_ = {name: size for name, size in found.items() if size != resource.RLIM_INFINITY}
    return ", ".join(f"{name} is {size // MB} MB" for name, size in set_.items())
