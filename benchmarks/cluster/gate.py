"""How the driver tells the ranks of a job whose turn it is: a line of JSON each way over TCP.

Ranks that are not at it must not compute: each blocks in a read, and the driver stops its process
besides, because Horovod's waiting ranks wake a thousand times a second, and MPI's poll.
Standard library only: ranks of MXNet as it comes import it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from typing import Any, Callable, Iterator, Mapping

LOOPBACK = "127.0.0.1"


class Lost(Exception):
    """A rank did not answer; why."""


class Gate:
    """The driver's end: it waits for a job's ranks, then asks all of them at once.

    ``seconds`` is how long any answer may take.
    """

    def __init__(self, num_ranks: int, seconds: float = 300) -> None:
        self.num_ranks, self.seconds = num_ranks, seconds
        self.listener = socket.create_server((LOOPBACK, 0), backlog=num_ranks)
        self.port = self.listener.getsockname()[1]
        self.pids: list[int] = []
        self._lines: dict[int, Any] = {}

    def open(self, ended: Callable[[], str | None] = lambda: None) -> list[dict]:
        """Wait until all ranks have come; what they say of themselves, by rank.

        ``ended()`` says why nobody will come any more, or None.
        """
        hellos: dict[int, dict] = {}
        self.listener.settimeout(0.2)
        deadline = time.monotonic() + self.seconds
        while len(hellos) < self.num_ranks:
            try:
                connection, _ = self.listener.accept()
            except socket.timeout:
                why = ended() or ("that is all" if time.monotonic() > deadline else None)
                if why:
                    raise Lost(
                        f"{len(hellos)} of {self.num_ranks} ranks have come: {why}"
                    ) from None
                continue
            connection.settimeout(self.seconds)
            with connection:  # the file keeps it open
                line = connection.makefile("rw")
            hello = _read(line)
            hellos[hello["rank"]], self._lines[hello["rank"]] = hello, line
            self.pids.append(hello["pid"])
        return [hellos[rank] for rank in sorted(hellos)]

    def ask(self, message: Mapping[str, Any]) -> list[dict]:
        """Let all ranks go on, send them the message, and stop them when all have answered."""
        self.signal(signal.SIGCONT)
        try:
            for line in self._lines.values():
                _write(line, message)
            return [_read(self._lines[rank]) for rank in sorted(self._lines)]
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        """Send a signal to all ranks that are still there."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """Kill all ranks, and hang up."""
        self.signal(signal.SIGKILL)
        self.listener.close()
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.close()


def turns(port: int, hello: Mapping[str, Any], answer_to: dict[str, Any]) -> None:
    """A rank's end: say hello, then answer each message until the driver hangs up.

    A message ``{"name": argument}`` is answered by ``answer_to["name"](argument)``, a dict.
    """
    with socket.create_connection((LOOPBACK, port)) as connection:
        line = connection.makefile("rw")
        _write(line, {"pid": os.getpid(), **hello})
        for message in _messages(line):
            ((name, argument),) = message.items()
            _write(line, answer_to[name](argument))


def _messages(line: Any) -> Iterator[dict]:
    for text in line:
        yield json.loads(text)


def _write(line: Any, message: Mapping[str, Any]) -> None:
    try:
        line.write(json.dumps(message) + "\n")
        line.flush()
    except OSError as error:
        raise Lost(f"a rank has hung up: {error}") from error


def _read(line: Any) -> dict:
    try:
        text = line.readline()
    except OSError as error:
        raise Lost(f"a rank does not answer: {error}") from error
    if not text:
        raise Lost("a rank has ended")
    return json.loads(text)
