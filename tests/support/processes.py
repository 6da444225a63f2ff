"""What the system says of a process, and waiting for it."""

import time
from pathlib import Path


def state(pid: int) -> str:
    """The letter of its state, as in ps; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def runs(pid: int) -> bool:
    """Whether there is such a process, and it is more than an entry in a table."""
    return state(pid) not in ("", "Z", "X")


def wait_until(condition, seconds=600):
    """Poll: a process that is killed ends a little later."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
