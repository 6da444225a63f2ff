"""scripts/get_data.py: its output and exit status, with apt-get and the loader replaced."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from gluonpar.training.data import dataset

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "get_data.py"
INSTALL = ["apt-get", "install", "-y", "dataset-fashion-mnist"]
UPDATE = ["apt-get", "update"]


@pytest.fixture
def script(monkeypatch, tmp_path):
    """The script as a module, on a Debian, as root, with apt-get there."""
    spec = importlib.util.spec_from_file_location("get_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(module, "OS_RELEASE", tmp_path / "os-release")
    module.OS_RELEASE.write_text('NAME="Some"\nID=ubuntu\nID_LIKE="debian other"\n')
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    return module


@pytest.fixture
def commands(script, monkeypatch):
    """The commands run; their exit statuses are taken from `commands.statuses`, then 0."""

    class Commands(list):
        statuses: list = []

    ran = Commands()

    def run(command, env):
        assert env["DEBIAN_FRONTEND"] == "noninteractive"
        ran.append(command)
        return subprocess.CompletedProcess(command, ran.statuses.pop(0) if ran.statuses else 0)

    monkeypatch.setattr(script.subprocess, "run", run)
    return ran


def loads(monkeypatch, *outcomes):
    """Make each call of `load` in turn raise or return an outcome."""
    remaining = list(outcomes)

    def load(data_dir=None):
        outcome = remaining.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(dataset, "load", load)


NOWHERE = FileNotFoundError("was not found")
FOUND = dataset.synthetic(0, 10, 10)


def test_data_that_are_found_are_printed_and_nothing_is_run(script, commands, monkeypatch, capsys):
    loads(monkeypatch, FOUND)
    assert script.main([]) == 0
    assert capsys.readouterr().out == f"synthetic: {FOUND.source}\n"
    assert commands == []


@pytest.mark.parametrize(
    ("statuses", "commands_run", "status"),
    [
        ([0], [INSTALL], 0),
        ([100, 0, 0], [INSTALL, UPDATE, INSTALL], 0),
        ([100, 0, 100], [INSTALL, UPDATE, INSTALL], 1),
    ],
)
def test_debians_package_is_installed_after_an_update_of_the_lists_if_need_be(
    script, commands, monkeypatch, capsys, statuses, commands_run, status
):
    commands.statuses = statuses
    loads(monkeypatch, NOWHERE, FOUND)
    assert script.main([]) == status
    assert commands == commands_run
    out, err = capsys.readouterr()
    assert out.startswith(f"running: {' '.join(INSTALL)}\n")
    if status:
        assert err.startswith("was not found\n") and "exited with status 100" in err


@pytest.mark.parametrize(
    "reason", ["not root", "not Debian", "no apt-get", "no os-release", "--data-dir"]
)
def test_the_reason_why_apt_get_was_not_tried_is_printed(
    script, commands, monkeypatch, capsys, reason
):
    argv = []
    if reason == "not root":
        monkeypatch.setattr(script.os, "geteuid", lambda: 1000)
    elif reason == "not Debian":
        script.OS_RELEASE.write_text("ID=fedora\n")
    elif reason == "no os-release":
        script.OS_RELEASE.unlink()
        reason = "not Debian"
    elif reason == "no apt-get":
        monkeypatch.setattr(script.shutil, "which", lambda name: None)
    else:
        argv = ["--data-dir", "somewhere"]
    loads(monkeypatch, NOWHERE)
    assert script.main(argv) == 1
    assert commands == []
    error = capsys.readouterr().err
    assert "was not found" in error and "not tried, because" in error
    assert reason in error


def test_a_damaged_file_is_reported_and_nothing_is_installed(script, commands, monkeypatch, capsys):
    loads(monkeypatch, ValueError("FILE: truncated"))
    assert script.main([]) == 1
    assert capsys.readouterr().err == "FILE: truncated\n"
    assert commands == []


def test_a_package_that_cannot_be_imported_is_status_2(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gluonpar.training.data.dataset", None)
    assert script.main([]) == 2
    assert "gluonpar.training.data.dataset" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_runs_from_anywhere(tmp_path):
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--data-dir", str(tmp_path)],
        cwd=str(tmp_path),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert f"{tmp_path} (data_dir): lacks train-images" in result.stderr
    assert "Traceback" not in result.stderr
