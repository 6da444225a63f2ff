"""Work in a child process, which may fail in any way: what it tells, and how it ended.

Broken installations and devices raise exceptions, end the process and hang. The child calls
:func:`perform`, and :func:`tell` for each message; the parent reads :func:`messages`. Only the
standard library is imported here: the doctor works without MXNet.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from typing import Any, Callable, Iterator, Mapping, Sequence

TIMEOUT_SECONDS = 120.0  # importing MXNet takes 1 to 3 s, and much longer on a busy machine

_MARK = b"gluonpar-child:"  # others may write to standard output, too


class ChildFailed(Exception):
    """The child raised an exception, ended too early or was silent for too long."""


def perform(work: Callable[[], object]) -> None:
    """In the child: call ``work``, and tell the parent how it ended."""
    try:
        work()
    except Exception as error:  # a broken installation can raise anything
        _write({"failed": describe(error)})
    else:
        _write({"end": True})


def tell(message: Any) -> None:
    """In the child: send the parent something that JSON can hold."""
    _write({"message": message})


def messages(
    command: Sequence[str],
    timeout_seconds: float = TIMEOUT_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """In the parent: start ``command`` and give what it tells; at last raise how it failed, if so.

    Raises :class:`ChildFailed` also if nothing is told for ``timeout_seconds``. The child has ended
    when the iteration has.
    """
    pipe, errors = subprocess.PIPE, bytearray()
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment
        )
    except OSError as error:
        raise ChildFailed(f"no process could be started: {error}") from error
    with child:
        try:
            for line in _lines(child, timeout_seconds, errors):
                told = json.loads(line[len(_MARK) :]) if line.startswith(_MARK) else {}
                if "message" in told:
                    yield told["message"]
                elif "failed" in told:
                    raise ChildFailed(told["failed"])
                elif "end" in told:
                    return
            code = child.wait()
        finally:
            child.kill()
    last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
    how = f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"
    raise ChildFailed(f"the process ended with {how}; last line: {last[0]}")


def summary(error: Exception) -> str:
    """Return the most informative line of an exception; MXNet's begin with a C++ traceback."""
    lines = str(error).strip().splitlines() or [""]
    return (lines[-1] if lines[0].startswith("Traceback") else lines[0]).strip()


def describe(error: Exception) -> str:
    """Return the exception's type and its :func:`summary`, which may begin with the type."""
    kind, text = type(error).__name__, summary(error)
    return text if text.startswith(kind) else f"{kind}: {text}"


def load_average() -> float:
    """Return the mean number of runnable processes in the last minute; NaN if unknown."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return float("nan")


def _write(content: dict[str, Any]) -> None:
    print(f"\n{_MARK.decode()}{json.dumps(content)}", flush=True)


def _lines(child: subprocess.Popen, timeout_seconds: float, errors: bytearray) -> Iterator[bytes]:
    """Give the lines of the child's standard output; extend ``errors`` by its standard error."""
    outputs, begun = [child.stdout, child.stderr], b""
    while outputs:
        ready, _, _ = select.select(outputs, [], [], timeout_seconds)
        if not ready:
            load = f"the load average is {load_average():.0f}"
            raise ChildFailed(f"no result within {timeout_seconds:g} s ({load})")
        for output in ready:
            read = os.read(output.fileno(), 1 << 16)
            if not read:
                outputs.remove(output)
            elif output is child.stderr:
                errors += read
            else:
                *whole, begun = (begun + read).split(b"\n")
                yield from whole
