"""tools/make_venv.sh, with shell scripts in place of the interpreters."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "make_venv.sh"
CANDIDATES = ["python3", *(f"python3.{minor}" for minor in range(14, 7, -1))]

# $1 is -c for the questions about version and prefix, and -m for `-m venv FOLDER` and pip.
INTERPRETER = """#!/bin/sh
case "$1 $2" in
*base_prefix*) exit 1 ;;
-c*) echo {version} ;;
*venv) mkdir -p "$3/bin"; echo "$0" >"$3/made-by" ;;
esac
"""


class Machine:
    """A PATH on which no interpreter runs until a test adds one."""

    def __init__(self, folder):
        self.bin, self.venv = folder / "bin", folder / "venv"
        self.bin.mkdir()
        for name in CANDIDATES:
            self.python(name, None)

    def python(self, name, version):
        """Add an interpreter; without a version it fails, as a pyenv shim of an inactive one."""
        text = INTERPRETER.format(version=version) if version else "#!/bin/sh\nexit 127\n"
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def make_venv(self, *wanted):
        """Return the error, or nothing after success."""
        command, path = ["sh", str(SCRIPT), str(self.venv), *wanted], f"{self.bin}:/usr/bin:/bin"
        environment = {**os.environ, "PATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.stderr if done.returncode else ""

    def made_by(self):
        return Path((self.venv / "made-by").read_text().strip()).name


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("version", "taken"),
    [("3.8", "python3"), ("3.14", "python3"), ("3.15", "python3.10"), ("3.7", "python3.10")],
)
def test_the_first_interpreter_of_a_supported_version_is_taken(machine, version, taken):
    machine.python("python3", version)
    machine.python("python3.10", "3.10")
    assert not machine.make_venv() and machine.made_by() == taken


def test_without_an_interpreter_the_error_lists_what_was_tried(machine):
    machine.python("python3", "3.15")
    assert "python3 (3.15), python3.14 (does not run)" in machine.make_venv()
    assert not machine.venv.exists()


def test_another_interpreter_replaces_the_environment_unless_it_does_not_fit(machine):
    machine.python("python3", "3.11")
    machine.python("python3.8", "3.8")
    machine.python("new", "3.15")
    assert not machine.make_venv()
    (machine.venv / "left-over").touch()
    assert machine.make_venv("new")
    assert (machine.venv / "left-over").exists() and machine.made_by() == "python3"
    assert not machine.make_venv("python3.8")
    assert not (machine.venv / "left-over").exists() and machine.made_by() == "python3.8"


def test_what_make_did_not_create_is_never_removed(machine):
    machine.python("python3", "3.11")
    (machine.venv / "bin").mkdir(parents=True)
    assert machine.make_venv() and (machine.venv / "bin").exists()
    machine.python("hand-made", "3.10")
    (machine.bin / "hand-made").rename(machine.venv / "bin" / "python")
    assert not machine.make_venv()  # it is an environment, which is used
    assert machine.make_venv("python3")
    assert (machine.venv / "bin" / "python").exists()
