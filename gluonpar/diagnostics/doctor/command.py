"""python -m gluonpar doctor: what is installed and what is wrong, with a remedy for each fault.

    python -m gluonpar doctor           # as text
    python -m gluonpar doctor --json    # {"wrong": number, "findings": [...]}, the same findings

Exit code 0: nothing is wrong. 1: something is. The doctor changes nothing, downloads nothing, and
works without MXNet and NumPy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import NamedTuple, Sequence

from gluonpar.diagnostics.doctor import checks, probes
from gluonpar.diagnostics.doctor.checks import NOTE, WRONG


class Finding(NamedTuple):
    """What a check found; see :mod:`gluonpar.diagnostics.doctor.checks` for the states."""

    topic: str
    state: str
    text: str
    remedy: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Print all findings, as text or JSON; return 1 if something is wrong, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m gluonpar doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    as_json = parser.parse_args(argv).json
    findings = examine()
    num_wrong = sum(finding.state == WRONG for finding in findings)
    if as_json:
        found = {"wrong": num_wrong, "findings": [finding._asdict() for finding in findings]}
        _print(json.dumps(found, indent=2))
    else:
        last = f"{num_wrong} wrong" if num_wrong else "nothing is wrong"
        _print("\n".join([*map(_as_text, findings), last]))
    return 1 if num_wrong else 0


def examine() -> list[Finding]:
    """Run all checks; if one raises an exception, that is its last finding."""
    findings: list[Finding] = []
    for topic, check in checks.CHECKS.items():
        try:
            for found in check():
                findings.append(Finding(topic, *found))
        except probes.ProbeFailed as error:
            findings.append(Finding(topic, WRONG, f"cannot be used: {error}", error.remedy))
        except Exception as error:  # a broken installation can break anything
            text = f"the check failed: {type(error).__name__}: {error}"
            remedy = "repair the other findings first; then report this message"
            findings.append(Finding(topic, WRONG, text, remedy))
    return findings


def _as_text(finding: Finding) -> str:
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
            sys.stderr.write(f"python -m gluonpar doctor: standard output: {error}\n")
