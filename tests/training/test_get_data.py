"""scripts/get_data.py: its output and exit status, with apt-get and the loader replaced."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from processes import end

from gluonpar.training.data import dataset

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "get_data.py"
NOT_FOUND = FileNotFoundError("was not found")
DATASET = dataset.synthetic(0, 10, 10)


@pytest.fixture
def script(monkeypatch):
    """The script as a module, for root, with apt-get there."""
    spec = importlib.util.spec_from_file_location("get_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    return module


@pytest.mark.parametrize(
    ("found", "statuses", "executed"),
    [
        ([DATASET], [], []),
        ([ValueError("FILE: damaged")], [], []),
        ([NOT_FOUND, DATASET], [100, 0, 0], ["install", "update", "install"]),
        ([NOT_FOUND], [100, 0, 100], ["install", "update", "install"]),
        ([NOT_FOUND], [100, 100], ["install", "update"]),
    ],
)
def test_debians_package_is_installed_if_nothing_is_found(
    script, found, statuses, executed, monkeypatch, capsys
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
    monkeypatch.setattr(script.subprocess, "run", execute)
    fails = isinstance(found[-1], Exception)
    assert (script.main([]), commands) == (fails, executed)
    out, err = capsys.readouterr()
    assert (str(found[-1]) in err) if fails else out.endswith(f"synthetic: {DATASET.source}\n")


@pytest.mark.parametrize("reason", ["not root", "no apt-get", "--data-dir"])
def test_apt_get_is_not_tried_without_root_or_with_a_data_dir(script, reason, monkeypatch, capsys):
    if reason == "not root":
        monkeypatch.setattr(script.os, "geteuid", lambda: 1000)
    elif reason == "no apt-get":
        monkeypatch.setattr(script.shutil, "which", lambda name: None)

    def load(data_dir=None):
        raise NOT_FOUND

    monkeypatch.setattr(dataset, "load", load)
    monkeypatch.setattr(script.subprocess, "run", None)
    assert script.main(["--data-dir", "somewhere"] if reason == "--data-dir" else []) == 1
    assert "was not found" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_runs_from_anywhere(tmp_path):
    done = end(SCRIPT, "--data-dir", tmp_path, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{tmp_path} (data_dir): lacks train-images" in done.stderr
