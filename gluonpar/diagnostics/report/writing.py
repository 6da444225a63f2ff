"""Measure, conclude, and write a report: FILE.json with everything, and FILE.md to be read."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Sequence

import mxnet as mx

from gluonpar.checkpoint import files
from gluonpar.diagnostics.doctor import command as doctor
from gluonpar.diagnostics.doctor.checks import WRONG
from gluonpar.diagnostics.report import conclusions, measurement
from gluonpar.diagnostics.report.page import page


def check_path(path: str | os.PathLike) -> tuple[Path, Path]:
    """Return the paths of both files; ValueError unless both can be written, and nothing is."""
    paths = Path(path), Path(path).with_suffix(".md")
    if paths[0].suffix != ".json":
        raise ValueError(f"the report must be a file named *.json, got {path}")
    for each in paths:
        try:
            files.check_replaceable(each)
        except OSError as error:
            raise ValueError(f"cannot write {each}: {error.strerror}") from error
    return paths


def write(
    paths: tuple[Path, Path],
    ctx: Sequence[mx.Context],
    seconds: float = measurement.SECONDS,
    batch_size: int | None = None,
    command: str = "",
) -> bool:
    """Write the report on the devices ``ctx`` to both files; return whether nothing is wrong.

    The arguments are those of :func:`measurement.collect`; ``command`` is written, too. The self
    test's lines and the findings are printed, progress goes to standard error. Each file is written
    whole or not at all. Raises OSError if that is no longer possible.
    """
    start = time.monotonic()

    def progress(what: str) -> None:
        print(f"{time.monotonic() - start:4.0f} s  {what}", file=sys.stderr, flush=True)

    def line(text: str) -> None:
        print(text, flush=True)

    report = {"command": command, **measurement.collect(ctx, seconds, batch_size, line, progress)}
    findings = conclusions.conclude(report)
    report["simulated"] = conclusions.simulated(report)
    report["findings"] = [finding._asdict() for finding in findings]
    line("\n".join(map(doctor.as_text, findings)))
    for path, text in zip(paths, (json.dumps(report, indent=1) + "\n", page(report))):
        with files.atomic_write(path) as file:
            file.write(text.encode())
    line(f"report: {paths[0]}, as a page: {paths[1]}")
    return not any(finding.state == WRONG for finding in findings)
