"""A process that is told what to do by one line of JSON, and answers with one."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Any, Mapping, Sequence

WORKER = pathlib.Path(__file__).with_name("worker.py")
LAST_LINES = 5
PATIENCE_SECONDS = 60  # of an interpreter that has nothing to do


class Unable(Exception):
    """A candidate cannot do what is asked, and why; no failure."""


class Died(Exception):
    """A process ended when it should have answered; how, and the last lines of its stderr."""


def request(module: str, task: Sequence, options: Mapping, runtime: str = "") -> str:
    """What a worker gets as its argument: which module trains which task, and how prepared."""
    return json.dumps({"module": module, "task": task, "options": options, "runtime": runtime})


def command(worker_request: str, python: str = sys.executable) -> list[str]:
    """How to start a worker."""
    return [python, str(WORKER), worker_request]


class Child:
    """A process with pipes to it. One that ``leads`` takes all that it started along when it ends.

    It is a session of its own then, so that Ctrl-C reaches only the parent, which ends it. If the
    parent is killed outright, the child reads the end of its stdin, and ends by itself.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], leads: bool = True) -> None:
        self._leads = leads
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=dict(env),
            start_new_session=leads,
            text=True,
        )

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a line; :class:`Died` if nobody reads."""
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._died()

    def hear(self) -> dict[str, Any]:
        """Wait for a line; :class:`Died` if none comes, :class:`Unable` if that is the answer."""
        line = self._process.stdout.readline()
        if not line:
            self._died()
        answer = json.loads(line)
        if "unable" in answer:
            raise Unable(answer["unable"])
        return answer

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        self.tell(message)
        return self.hear()

    def end(self) -> None:
        """Kill it, and what it started if it leads; return when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            if self._leads:
                os.killpg(self._process.pid, signal.SIGKILL)  # before it is reaped: the id is ours
            else:
                self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._stderr.close()

    def _died(self) -> None:
        """It closed its pipe, so it is ending or has ended."""
        try:
            code = self._process.wait(timeout=5)
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = "it closed its output"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        raise Died("\n  ".join([how, *lines]))


def check_python(option: str, path: str) -> None:
    """Raise ValueError, naming the ``option``, unless ``path`` is a Python that can be started."""
    nowhere = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
    try:
        done = subprocess.run([path, "-c", ""], timeout=PATIENCE_SECONDS, **nowhere)
    except OSError as error:
        raise ValueError(f"{option}={path} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{option}={path} is no Python: it does not end within {PATIENCE_SECONDS} s"
        ) from error
    if done.returncode:
        raise ValueError(f"{option}={path} is no Python: exit code {done.returncode}")
