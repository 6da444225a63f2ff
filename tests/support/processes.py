"""Running a Python program in a process of its own, what the system says of one, and waiting."""

import os
import subprocess
import sys
import time

import psutil


def end(*arguments, cwd=None, seconds=600, wrapper=(), stdin=None, **variables):
    """Run this Python with these arguments, by the command ``wrapper``; return the ended process.

    ``stdin`` is text. ``variables`` are set in its environment, or removed where they are None.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run(
        [*wrapper, sys.executable, *map(str, arguments)],
        cwd=cwd,
        input=stdin,
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


def runs(pid: int) -> bool:
    """Whether there is such a process, and it is more than an entry in a table."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def address_space_once_imported() -> int:
    """The bytes of address space that a process has which has imported gluonpar and MXNet."""
    return int(
        run_python(
            "import gluonpar.training.run, psutil; print(psutil.Process().memory_info().vms)"
        )
    )


def wait_until(condition, seconds=600):
    """Poll: a process that is killed ends a little later."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
