"""scripts/get_data.py: its output and exit status, with apt-get and the loader replaced."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gluonpar.training.data import dataset
from tests.support.processes import end

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "get_data.py"
NOT_FOUND = FileNotFoundError("was not found")
DATASET = dataset.synthetic(0, 10, 10)


@pytest.mark.parametrize(
    ("found", "statuses", "executed", "without"),
    [
        ([DATASET], [], [], None),
        ([ValueError("FILE: damaged")], [], [], None),
        ([NOT_FOUND, DATASET], [100, 0, 0], ["install", "update", "install"], None),
        ([NOT_FOUND], [100, 0, 100], ["install", "update", "install"], None),
        ([NOT_FOUND], [100, 100], ["install", "update"], None),
        *(([NOT_FOUND], [], [], what) for what in ("root", "apt-get", "a choice of folders")),
    ],
)
def test_debians_package_is_installed_if_nothing_is_found(
    found, statuses, executed, without, monkeypatch, capsys
):
    """Each call of ``load`` in turn finds or raises the next of ``found``."""
    outcomes, statuses, commands = iter(found), iter(statuses), []

    def load(data_dir=None):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def execute(command, env):
        assert env["DEBIAN_FRONTEND"] == "noninteractive" and command[0] == "apt-get"
        commands.append(command[1])
        return subprocess.CompletedProcess(command, next(statuses))

    monkeypatch.setattr(dataset, "load", load)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds to it
    monkeypatch.setattr(subprocess, "run", execute)
    monkeypatch.setattr(os, "geteuid", lambda: 1000 if without == "root" else 0)
    apt_get = None if without == "apt-get" else "/usr/bin/apt-get"
    monkeypatch.setattr(shutil, "which", lambda name: apt_get)
    options = ["--data-dir", "somewhere"] if without == "a choice of folders" else []
    fails = isinstance(found[-1], Exception)
    main = runpy.run_path(str(SCRIPT))["main"]
    assert (main(options), commands) == (fails, executed)
    out, err = capsys.readouterr()
    assert (str(found[-1]) in err) if fails else out.endswith(f"synthetic: {DATASET.source}\n")


@pytest.mark.slow
def test_the_script_runs_from_anywhere(tmp_path):
    done = end(SCRIPT, "--data-dir", tmp_path, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{tmp_path} (data_dir): lacks train-images" in done.stderr
