"""gluonpar doctor: print what is installed and what is wrong, with a remedy for each fault.

It changes nothing, downloads nothing, and works without MXNet and NumPy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple, Sequence

from gluonpar.diagnostics import child_process
from gluonpar.diagnostics.child_process import TIMEOUT_SECONDS
from gluonpar.diagnostics.doctor import checks
from gluonpar.diagnostics.doctor.checks import NOTE, WRONG
from gluonpar.install import entry

_STANDALONE = Path(__file__).parents[2] / "install" / "standalone.py"
_CHILD = f"""
import sys
sys.path[:] = filter(None, sys.path)  # without the current folder, whose files may shadow modules
import runpy
runpy.run_path(sys.argv[1])["skip_init"](*{checks.SKIPPED!r})
from gluonpar.diagnostics.doctor import command
command.tell_findings(sys.argv[2])
"""


class Finding(NamedTuple):
    """What a check found; see :mod:`gluonpar.diagnostics.doctor.checks` for the states."""

    topic: str
    state: str
    text: str
    remedy: str = ""


EXAMPLES = """
gluonpar doctor
gluonpar doctor --json    # {"wrong": number, "findings": [...]}, the same findings
"""
EXIT_CODES = {
    0: "nothing is wrong",
    1: "something is wrong, and printed with a remedy",
    entry.BAD_REQUEST: "an option is unknown",
}


def main(argv: Sequence[str] | None = None, prog: str = "gluonpar doctor") -> int:
    """Print all findings, as text or JSON; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=entry.about(__doc__),
        epilog=entry.epilog(EXAMPLES, EXIT_CODES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    as_json = parser.parse_args(argv).json
    findings = [finding for topic in checks.CHECKS for finding in examine(topic)]
    num_wrong = sum(finding.state == WRONG for finding in findings)
    if as_json:
        found = {"wrong": num_wrong, "findings": [finding._asdict() for finding in findings]}
        _print(json.dumps(found, indent=2))
    else:
        last = f"{num_wrong} wrong" if num_wrong else "nothing is wrong"
        _print("\n".join([*map(as_text, findings), last]))
    return 1 if num_wrong else 0


def examine(topic: str, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Finding]:
    """Run one check in a child process, which it may end; if it fails, the last finding says so.

    The child imports modules without ``gluonpar/__init__.py``, so without MXNet.
    """
    command, findings = [sys.executable, "-c", _CHILD, str(_STANDALONE), topic], []
    try:
        for found in child_process.messages(command, timeout_seconds):
            findings.append(Finding(topic, *found))
    except child_process.ChildFailed as how:
        findings.append(Finding(topic, WRONG, f"failed: {how}", checks.CHECKS[topic][1]))
    return findings


def tell_findings(topic: str) -> None:
    """In the child: run the check and tell its findings."""
    check, _ = checks.CHECKS[topic]
    child_process.perform(lambda: [child_process.tell(found) for found in check()])


def as_text(finding: Finding) -> str:
    """Return the finding as a line, and one for the remedy if there is one."""
    mark = {WRONG: "WRONG", NOTE: "note"}.get(finding.state, "ok")
    remedy = f"\n       -> {finding.remedy}" if finding.remedy else ""
    return f"{mark:<6} {finding.topic}: {finding.text}{remedy}"


def _print(text: str) -> None:
    """Write to standard output as much as it takes; a full disk must not hide the exit code."""
    if sys.stdout is None:  # closed before Python started
        return
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except OSError as error:
        # Else Python would fail again at its end, when it writes what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # as in `doctor | head`
            sys.stderr.write(f"gluonpar doctor: standard output: {error}\n")
