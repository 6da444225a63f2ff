"""Running a Python program in a process of its own, what the system says of one, and waiting."""

import os
import subprocess
import sys
import time
from pathlib import Path


def end(*arguments, cwd=None, seconds=600, **variables):
    """Run this Python with these arguments; return the ended process.

    ``variables`` are set in its environment, or removed from it where they are None.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def end_python(program: str, *arguments, **options):
    """Run the text of a program as ``end`` does."""
    return end("-c", program, *arguments, **options)


def run_python(program: str, *arguments, **options) -> str:
    """Run the program as ``end_python`` does; it succeeds. Return what it printed."""
    done = end_python(program, *arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
