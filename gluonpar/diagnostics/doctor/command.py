"""python -m gluonpar doctor: what is installed and what is wrong, each with its remedy.

    python -m gluonpar doctor           # in words
    python -m gluonpar doctor --json    # {"wrong": number, "findings": [...]}, the same findings

Exit code 0: nothing is wrong. 1: something is. It looks, changes nothing and downloads nothing, and
needs neither MXNet nor NumPy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Callable, Iterator, Sequence

from gluonpar.diagnostics.doctor import checks, gpu_checks
from gluonpar.diagnostics.doctor.findings import NOTE, WRONG, Finding

CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    checks.python,
    checks.numpy,
    checks.mxnet,
    gpu_checks.gpus,
    gpu_checks.cuda_libraries,
    checks.settings,
    checks.threads,
    checks.shared_memory,
    checks.data,
    checks.mpi,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what ``argv`` asks (default: the process's arguments); the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gluonpar doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    return report(parser.parse_args(argv).json)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def report(as_json: bool = False) -> int:
    """Print all findings, in words or as JSON; 1 if something is wrong, else 0."""
    findings = examine()
    num_wrong = sum(finding.state == WRONG for finding in findings)
    if as_json:
        shown = {"wrong": num_wrong, "findings": [finding._asdict() for finding in findings]}
        lines = [json.dumps(shown, indent=2)]
    else:
        lines = [line for finding in findings for line in _in_words(finding)]
        lines.append(f"{num_wrong} wrong" if num_wrong else "nothing is wrong")
    _print("\n".join(lines))
    return 1 if num_wrong else 0


def _print(text: str) -> None:
    """Write to standard output as much as it takes; the exit code says the rest."""
    if sys.stdout is None:  # closed before Python started
        return
    encoding = sys.stdout.encoding or "ascii"  # a name that this terminal lacks is no reason
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        # What is still buffered must not fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # `doctor | head` has seen enough
            sys.stderr.write(f"python -m gluonpar doctor: standard output: {error}\n")


def examine() -> list[Finding]:
    """All findings. A check that fails with an exception has that for its finding."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found.extend(check())
        except Exception as error:  # a broken installation breaks things nobody has thought of
            text = f"could not be examined: {type(error).__name__}: {error}"
            found.append(Finding(check.__name__, WRONG, text, "the message is all that is known"))
    return found


def _in_words(finding: Finding) -> Iterator[str]:
    mark = {WRONG: "WRONG", NOTE: "note"}.get(finding.state, "ok")
    yield f"{mark:<6} {finding.topic}: {finding.text}"
    if finding.remedy:
        yield f"       -> {finding.remedy}"
