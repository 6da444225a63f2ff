"""How a process of a job ends when the job cannot go on."""

from __future__ import annotations

import errno
import os
import pathlib
import socket
import sys
from typing import TextIO

_LAUNCHERS = ("prterun", "mpirun", "orterun")

# Rank 0's last will: mpirun, told to end the job, waits for a host that is cut off until TCP gives
# up, a quarter of an hour; so it is asked again after 4 s, and killed a second later.
_URGE = """
for signal in 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 TERM TERM TERM TERM TERM KILL; do
    grep -qx 'prterun\\|mpirun\\|orterun' /proc/$0/comm 2>/dev/null || exit 0
    kill -$signal $0 2>/dev/null
    sleep 0.2
done
"""


def urge_the_launcher() -> None:
    """Have mpirun, if it has started this process, gone in 5 s, whatever it waits for.

    Spawned, not forked as subprocess does under Python 3.8: before a fork MXNet waits for all
    operators, and the one that waits for the lost rank never ends.
    """
    quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    command = ["sh", "-c", _URGE, str(os.getppid())]
    os.posix_spawn("/bin/sh", command, os.environ, file_actions=quiet, setsid=True)


def output_of_the_launcher() -> TextIO | None:
    """Where mpirun, if it has started this process, prints its own errors; None if that is unknown.

    A launcher that gets Ctrl-C reads no more of what its ranks print before it signals them.
    """
    launcher = pathlib.Path("/proc", str(os.getppid()))
    try:
        if (launcher / "comm").read_text().strip() in _LAUNCHERS:
            return open(launcher / "fd" / "2", "a")
    except OSError:  # it is another user's, or a socket
        return None
    return None


def speaks_first(token: str) -> bool:
    """Whether no other process of this machine has asked before, while it ran, with this token.

    The name of a socket in Linux's abstract namespace is had by one process alone, and is given
    back when that ends. Elsewhere everybody may speak.
    """
    voice = socket.socket(socket.AF_UNIX)
    try:
        voice.bind(f"\0gluonpar-{token}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    finally:
        voice.detach()  # it stays open as long as this process runs
    return True


def say(verdict: str, output: TextIO | None = None) -> None:
    """The one line that is to be seen of how a job ended."""
    print(f"gluonpar: {verdict}; the job ends", file=output or sys.stderr, flush=True)


def leave(code: int) -> None:
    """Leave without waiting for threads or MPI, which would wait for the rank that is lost."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def last_line(error: BaseException) -> str:
    """The error in a line: MXNet's begin with a traceback, and end with what it was."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    return f"{name}: {lines[-1]}" if lines else name
