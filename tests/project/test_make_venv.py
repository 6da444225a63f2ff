"""tools/make_venv.sh, with shell scripts in place of the interpreters."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "make_venv.sh"
CANDIDATES = ["python3", *(f"python3.{minor}" for minor in range(14, 7, -1))]

# $1 is -c for the questions about version and prefix, -m for `-m venv FOLDER` and pip, and -I for
# the question which of gcc's libraries are missing.
INTERPRETER = """#!/bin/sh
case "$1 $2" in
*base_prefix*) exit 1 ;;
-c*) echo {version} ;;
-I*) echo {missing} ;;
*venv) {venv} ;;
esac
"""
MAKES_IT = 'mkdir -p "$3/bin"; echo "$0" >"$3/made-by"'


class Machine:
    """A PATH on which no interpreter runs until a test adds one."""

    def __init__(self, folder: Path):
        self.folder, self.bin, self.venv = folder, folder / "bin", folder / "venv"
        self.bin.mkdir()
        for name in CANDIDATES:
            self.program(name, "#!/bin/sh\nexit 127\n")  # as a pyenv shim of an inactive version

    def program(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, name: str, version: str, venv=MAKES_IT, missing: str = "") -> Path:
        values = {"version": version, "venv": venv, "missing": missing}
        return self.program(name, INTERPRETER.format(**values))

    def user(self, number: int) -> None:
        """Make ``id -u`` print the number, and apt-get write its arguments into a file."""
        self.program("id", f"#!/bin/sh\necho {number}\n")
        self.program("apt-get", f'#!/bin/sh\necho "$@" >{self.folder}/installed\n')

    def make_venv(self, *wanted: str) -> subprocess.CompletedProcess:
        return self.run("sh", str(SCRIPT), str(self.venv), *wanted)

    def run(self, *command: str) -> subprocess.CompletedProcess:
        outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")  # of `make test PYTHON=...`
        inherited = {name: text for name, text in os.environ.items() if name not in outer}
        return subprocess.run(
            command,
            env={**inherited, "PATH": f"{self.bin}:/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def made_by(self) -> str:
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
    machine.python("python3.8", "3.8")
    assert machine.make_venv().returncode == 0
    assert machine.made_by() == taken
    assert sorted(path.name for path in machine.venv.iterdir()) == [".made", "bin", "made-by"]


def test_without_an_interpreter_the_error_lists_what_was_tried(machine):
    machine.python("python3", "3.15")
    result = machine.make_venv()
    assert result.returncode != 0
    assert "python3 (3.15), python3.14 (does not run)" in result.stdout
    assert "PYTHON=/path/to/python3.13" in result.stdout
    assert not machine.venv.exists()


def test_another_interpreter_replaces_the_environment_unless_it_does_not_fit(machine):
    machine.python("python3", "3.11")
    machine.python("python3.8", "3.8")
    machine.python("new", "3.15")
    assert machine.make_venv().returncode == 0
    (machine.venv / "left-over").touch()
    assert machine.make_venv("new").returncode != 0
    assert (machine.venv / "left-over").exists() and machine.made_by() == "python3"
    assert machine.make_venv("python3.8").returncode == 0
    assert not (machine.venv / "left-over").exists() and machine.made_by() == "python3.8"


def test_a_folder_that_make_did_not_create_is_never_removed(machine):
    machine.python("python3", "3.11")
    machine.venv.mkdir()
    (machine.venv / "thesis.tex").touch()
    assert machine.make_venv().returncode != 0
    assert (machine.venv / "thesis.tex").exists()


def test_an_environment_made_by_hand_is_used_and_kept(machine):
    machine.python("python3", "3.11")
    (machine.venv / "bin").mkdir(parents=True)
    machine.python("hand-made", "3.10").rename(machine.venv / "bin" / "python")
    assert machine.make_venv().returncode == 0
    assert (machine.venv / ".made").read_text() == "adopted\n"
    assert machine.make_venv("python3").returncode != 0
    assert (machine.venv / "bin" / "python").exists()


@pytest.mark.parametrize("user", [0, 1000])
def test_root_installs_gcc_s_missing_libraries_and_others_get_the_line_to_type(machine, user):
    copies_itself = 'mkdir -p "$3/bin"; cp "$0" "$3/bin/python"'
    machine.python("python3", "3.13", venv=copies_itself, missing="libgomp1 libquadmath0")
    machine.user(user)
    stamp = f"{machine.venv}/.runs"
    result = machine.run("make", "-C", str(ROOT), f"VENV={machine.venv}", "EXTRA=cpu", stamp)
    assert "apt-get install libgomp1 libquadmath0" in result.stdout
    installed = machine.folder / "installed"
    assert (result.returncode == 0) == installed.exists() == Path(stamp).exists() == (user == 0)
    assert user != 0 or installed.read_text().endswith(" libgomp1 libquadmath0\n")
