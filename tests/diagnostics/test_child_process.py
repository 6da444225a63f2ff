"""What a child process tells arrives, and however it fails, its parent learns how."""

import os
import sys

import pytest

from gluonpar.diagnostics import child_process
from gluonpar.diagnostics.child_process import ChildFailed, messages

# The module by its path: a child needs neither MXNet nor gluonpar.
BEGINNING = """
import os, runpy, signal, sys, time
globals().update(runpy.run_path(sys.argv[1]))
"""


def told(work, **options):
    """Run ``work``, which may ``tell``, in a child; return its messages and how it failed."""
    command, found = [sys.executable, "-c", BEGINNING + work, child_process.__file__], []
    try:
        for message in messages(command, **options):
            found.append(message)
    except ChildFailed as how:
        return found, str(how)
    return found, None


def test_all_messages_arrive_in_order_and_other_output_is_ignored():
    work = "print('hello')\nperform(lambda: [tell({'i': i, 'text': 'x' * i}) for i in range(3000)])"
    found, how = told(work)
    assert how is None
    assert found == [{"i": i, "text": "x" * i} for i in range(3000)]


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ("perform(lambda: [tell(1), 1 / 0])", "ZeroDivisionError: division by zero"),
        ("tell(1); os.kill(os.getpid(), signal.SIGSEGV)", "signal 11, Segm"),
        ("tell(1); print('last words', file=sys.stderr); os._exit(3)", "code 3; last line: last w"),
        ("tell(1); sys.exit(0)", "exit code 0"),
        ("tell(1); sys.stderr.write('x' * 300000 + '\\nend'); os._exit(1)", "last line: end"),
    ],
)
def test_what_was_told_before_a_failure_is_kept_and_the_failure_described(work, words):
    found, how = told(work)
    assert found == [1]
    assert words in how


def test_a_silent_child_is_ended():
    child = messages([sys.executable, "-c", "import time; time.sleep(600)"], timeout_seconds=0.1)
    with pytest.raises(ChildFailed, match=r"within 0.1 s \(the load average is "):
        next(child)


def test_the_child_ends_with_the_iteration():
    work = "tell(os.getpid()); time.sleep(600)"
    child = messages([sys.executable, "-c", BEGINNING + work, child_process.__file__])
    pid = next(child)
    child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_program_that_does_not_exist_is_a_failure():
    with pytest.raises(ChildFailed, match="no process could be started"):
        next(messages(["/no/such/program"]))
