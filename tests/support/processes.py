"""Running a Python program in a process of its own, what the system says of one, and waiting."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
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


# Importing MXNet takes longer than most of these programs. The process that is forked has computed
# nothing. A child leaves the loop, and ends as any program does. In a fork MXNet computes each
# operator on one thread.
FORKED = """
import json, os, signal, sys
import gluonpar.training.run
# A program that stands still is ended, whatever it does with its own signals.
signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
for line in sys.stdin:
    program, arguments, environment, *files = json.loads(line)
    child = os.fork()
    if not child:
        break
    signal.alarm(600)
    print(os.waitpid(child, 0)[1], flush=True)
    signal.alarm(0)
else:
    sys.exit()
signal.signal(signal.SIGALRM, signal.SIG_DFL)
for i, name in enumerate((os.devnull, *files)):
    os.dup2(os.open(name, os.O_RDWR), i)
os.environ.clear()
os.environ.update(environment)
sys.argv[1:] = arguments
exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
"""


@functools.lru_cache(None)
def _forked():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", FORKED]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, **pipes)
    atexit.register(process.communicate)  # it ends with its input
    return process


def end_fork(program: str, *arguments):
    """Run the program as ``end_python`` does, where gluonpar and MXNet have been imported."""
    process, words = _forked(), [*map(str, arguments)]
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        request = program, words, dict(os.environ), out.name, err.name
        print(json.dumps(request), file=process.stdin, flush=True)
        status = int(process.stdout.readline())
        code = -(status & 127) or status >> 8
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def run_fork(program: str, *arguments) -> str:
    """Run the program as ``end_fork`` does; it succeeds. Return what it printed."""
    done = end_fork(program, *arguments)
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
