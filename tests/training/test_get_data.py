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
INSTALL = ["apt-get", "install", "-y", "dataset-fashion-mnist"]
UPDATE = ["apt-get", "update"]
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


@pytest.fixture
def run(script, monkeypatch, capsys):
    """run(loads, statuses, *argv): exit status, output, errors and the commands that were run.

    Each call of ``load`` in turn raises or returns one of ``loads``; the commands end with the
    ``statuses``.
    """

    def run(loads, statuses, *argv):
        loads, statuses, commands = iter(loads), iter(statuses), []

        def load(data_dir=None):
            outcome = next(loads)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        def execute(command, env):
            assert env["DEBIAN_FRONTEND"] == "noninteractive"
            commands.append(command)
            return subprocess.CompletedProcess(command, next(statuses))

        monkeypatch.setattr(dataset, "load", load)
        monkeypatch.setattr(script.subprocess, "run", execute)
        return (script.main(argv), *capsys.readouterr(), commands)

    return run


@pytest.mark.parametrize(
    ("loads", "statuses", "commands", "errors"),
    [
        ([DATASET], [], [], []),
        ([ValueError("FILE: damaged")], [], [], ["FILE: damaged\n"]),
        ([NOT_FOUND, DATASET], [0], [INSTALL], []),
        ([NOT_FOUND, DATASET], [100, 0, 0], [INSTALL, UPDATE, INSTALL], []),
        (
            *([NOT_FOUND, DATASET], [100, 0, 100], [INSTALL, UPDATE, INSTALL]),
            ["was not found", "exited with status 100"],
        ),
    ],
)
def test_debians_package_is_installed_if_nothing_is_found(run, loads, statuses, commands, errors):
    """After an update of apt's lists if need be."""
    status, out, err, executed = run(loads, statuses)
    lines = [f"running: {' '.join(command)}\n" for command in commands]
    lines += [] if errors else [f"synthetic: {DATASET.source}\n"]
    assert (status, executed, out) == (bool(errors), commands, "".join(lines))
    assert all(words in err for words in errors) and bool(err) == bool(errors)


@pytest.mark.parametrize("reason", ["not root", "no apt-get", "--data-dir"])
def test_the_reason_why_apt_get_was_not_tried_is_printed(script, run, monkeypatch, reason):
    argv = ["--data-dir", "somewhere"] if reason == "--data-dir" else []
    if reason == "not root":
        monkeypatch.setattr(script.os, "geteuid", lambda: 1000)
    elif reason == "no apt-get":
        monkeypatch.setattr(script.shutil, "which", lambda name: None)
    status, _, err, commands = run([NOT_FOUND], [], *argv)
    assert (status, commands) == (1, [])
    assert "was not found" in err and "not tried, because" in err and reason in err


@pytest.mark.slow
def test_the_script_runs_from_anywhere(tmp_path):
    done = end(SCRIPT, "--data-dir", tmp_path, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{tmp_path} (data_dir): lacks train-images" in done.stderr
