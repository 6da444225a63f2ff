"""tools/test_matrix.py, with shell scripts in place of the interpreters."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import runs, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "test_matrix.py"
# All that is on PATH: /usr/bin might hold a python3.11.
TOOLS = "make git dirname mkdir cp sed cut cat rm ls touch id grep sleep mv"

# It "makes" an environment by copying itself there, and "installs" the NumPy that pip's constraint
# or an argument names. pip and pytest write their arguments into the environment and then run the
# commands of the test.
INTERPRETER = """#!/bin/sh
venv=$(dirname "$(dirname "$0")")
case "$1 $2 $3" in
"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m pip"*)
    echo "$@" >>"$venv/pip"
    [ ! -s "$PIP_CONSTRAINT" ] || cp "$PIP_CONSTRAINT" "$venv/numpy"
    for word; do case $word in numpy*) echo "$word" >"$venv/numpy" ;; esac; done
    {pip} ;;
"-m pytest"*) echo "$@" >"$venv/pytest"; {pytest} ;;
*metadata*) echo "$(sed 's/numpy[=>]*//' "$venv/numpy") mxnet 1.9.1" ;;
*"%d.%d.%d"*) echo {version} ;;
*"%d.%d"*) echo {version} | cut -d . -f 1,2 ;;
esac
"""
PASSES = 'echo "=== 7 passed, 2 skipped in 1.23s (0:00:01) ==="'
FAILS = 'echo "FAILED tests/a.py::b"; echo "1 failed, 5 passed, 2 skipped, 1 error in 9s"; exit 1'
NEWEST = ("--numpy", "newest")


class Machine:
    """A PATH and a home folder with no interpreters but those that a test adds."""

    def __init__(self, folder: Path):
        self.folder, self.bin, self.matrix = folder, folder / "bin", folder / "matrix"
        self.bin.mkdir()
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.environment = {
            "PATH": str(self.bin),
            "PYENV_ROOT": str(folder / "pyenv"),
            "HOME": str(folder),
        }

    def program(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, version: str, path=None, pytest: str = PASSES, pip: str = ":") -> Path:
        text = INTERPRETER.format(version=version, pytest=pytest, pip=pip)
        return self.program(path or self.bin / f"python{version.rpartition('.')[0]}", text)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(SCRIPT), "--folder", str(self.matrix), *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*arguments), env=self.environment, capture_output=True, text=True
        )

    def table(self) -> list[list[str]]:
        """The table's rows below the headings, as lists of cells."""
        lines = (self.matrix / "table.md").read_text().splitlines()
        rows = [line[2:-2].split(" | ") for line in lines if line.startswith("|")]
        assert rows[0] == ["Python", "NumPy", "result", "passed", "skipped", "failed", "seconds"]
        return rows[2:]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.slow
def test_each_interpreter_gets_its_oldest_numpy_and_the_newest_of_1_and_2(machine):
    machine.python("3.8.18")
    machine.python("3.12.1")
    machine.python("3.13.0")
    done = machine.run("--pythons", "3.8 3.12 3.13")
    assert done.returncode == 0, done.stderr
    assert [row[:6] for row in machine.table()] == [
        ["3.8.18", "1.17.3", "passed", "7", "2", "0"],
        ["3.8.18", "<2", "passed", "7", "2", "0"],  # the stand-in repeats the bound
        ["3.12.1", "1.26.0", "passed", "7", "2", "0"],
        ["3.12.1", "<2", "passed", "7", "2", "0"],
        ["3.12.1", "2", "passed", "7", "2", "0"],
        ["3.13.0", "2.1.0", "passed", "7", "2", "0"],
        ["3.13.0", "2", "passed", "7", "2", "0"],
    ]
    assert (machine.matrix / "3.8.18-numpy-1.17.3.txt").read_text() == "numpy==1.17.3\n"
    assert (machine.matrix / "3.12.1-numpy-1.txt").read_text() == "numpy<2\n"
    # No constraint, but afterwards: the extra requires NumPy 1.
    assert (machine.matrix / "3.12.1-numpy-2.txt").read_text() == ""
    assert "install --quiet numpy>=2\n" in (machine.matrix / "3.12.1-numpy-2/pip").read_text()
    assert (machine.matrix / "3.13.0-numpy-2.txt").read_text() == "numpy>=2\n"
    assert "mxnet 1.9.1, commit " in (machine.matrix / "table.md").read_text()


def test_numpy_can_be_named_and_all_supported_pythons_are_the_default(machine):
    machine.python("3.10.13")
    assert machine.run("--numpy", "1.25.1").returncode == 0
    rows = machine.table()
    assert sorted(row[:3] for row in rows) == sorted(
        [
            *([f"3.{i}", "", "not found"] for i in (8, 9, *range(11, 15))),
            ["3.10.13", "1.25.1", "passed"],
        ]
    )


def test_without_an_interpreter_the_exit_status_is_2(machine):
    done = machine.run("--pythons", "3.8 3.9 /no/such/python")
    assert done.returncode == 2
    assert "3.8 3.9 /no/such/python" in done.stderr
    assert not machine.matrix.exists()


@pytest.mark.slow
def test_a_failed_suite_is_counted_and_the_others_run(machine):
    machine.python("3.8.18", pytest=FAILS)
    machine.python("3.9.18", pip="echo no wheel; exit 1")
    machine.python("3.10.13", pytest="echo 3 passed; echo tests/a.py::b; kill -SEGV $$")
    machine.python("3.11.7")
    assert machine.run("--pythons", "3.8 3.9 3.10 3.11", *NEWEST).returncode == 1
    assert [row[:6] for row in machine.table()] == [
        ["3.8.18", "<2", "FAILED", "5", "2", "2"],  # an error in a fixture is a failure
        ["3.9.18", "2", "SET-UP FAILED", "", "", ""],
        ["3.10.13", "2", "FAILED", "", "", ""],
        ["3.11.7", "2", "passed", "7", "2", "0"],
    ]
    assert "FAILED tests/a.py::b" in (machine.matrix / "3.8.18-numpy-1.log").read_text()
    assert "no wheel" in (machine.matrix / "3.9.18-numpy-2.log").read_text()


@pytest.mark.slow
def test_a_second_run_keeps_the_environments(machine):
    machine.python("3.8.18")
    machine.run("--pythons", "3.8", *NEWEST)
    installed = machine.matrix / "3.8.18-numpy-1" / "pip"
    calls = installed.read_text()
    assert ".[cpu,test]" in calls
    machine.run("--pythons", "3.8", *NEWEST)
    assert installed.read_text() == calls


@pytest.mark.slow
def test_the_interpreter_must_run_and_have_the_version_of_its_name(machine):
    machine.program(machine.bin / "python3.8", "#!/bin/sh\nexit 127\n")  # an inactive shim
    for version in ("3.8.9", "3.8.18", "3.8.2"):
        machine.python(version, machine.folder / "pyenv/versions" / version / "bin/python")
    machine.python("3.9.18", machine.bin / "python3.10")
    uv = machine.python("3.10.20", machine.folder / "uv" / "python")
    answers = f'[ "$*" = "python find --system 3.10" ] && echo {uv}'
    machine.program(machine.bin / "uv", f"#!/bin/sh\n{answers}\n")
    path = machine.python("3.11.7", machine.folder / "opt" / "python")
    new = machine.python("3.15.0", machine.folder / "new" / "python")
    machine.run("--pythons", f"3.8 3.10 {path} {new}", *NEWEST)
    assert [row[0] for row in machine.table()] == [str(new), "3.8.18", "3.10.20", "3.11.7"]


@pytest.mark.parametrize("arguments", [("--pythons", "3.15"), ("--numpy", "old")])
def test_wrong_arguments_end_with_status_2(machine, arguments):
    done = machine.run(*arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr and arguments[1] in done.stderr


def test_the_selection_of_tests_is_passed_on_to_pytest(machine):
    machine.python("3.8.18")
    machine.run("--pythons", "3.8", *NEWEST, "-k", "ring or tree", "tests/test_a.py")
    told = (machine.matrix / "3.8.18-numpy-1" / "pytest").read_text()
    assert told == "-m pytest -v -rfE -k ring or tree tests/test_a.py\n"


def test_the_variables_of_make_reach_the_script_but_not_the_make_that_it_starts(machine):
    machine.python("3.8.18")
    machine.environment["MAKEFLAGS"] = "n -- VENV=elsewhere"
    assert machine.run("--pythons", "3.8", *NEWEST).returncode == 0
    assert (machine.matrix / "3.8.18-numpy-1" / ".tests").exists()
    variables = ("PYTHON=python3", "PYTHONS=3.8 3.12", "EXTRA=cpu", "ARGS=--numpy oldest")
    command = ["make", "-n", "--no-print-directory", "test-matrix", *variables]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert " ".join(told.replace("\\\n", "").split()) == (
        "python3 tools/test_matrix.py --pythons '3.8 3.12' --extra cpu --numpy oldest"
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything_and_the_finished_rows_are_written(machine, number):
    machine.python("3.8.18")
    # A shell's background processes ignore SIGINT.
    pid, told = machine.folder / "pid", machine.folder / "told"
    machine.python("3.9.18", pytest=f"sleep 600 & echo $! >{pid}; mv {pid} {told}; wait")
    machine.python("3.10.13")
    process = subprocess.Popen(
        machine.command("--pythons", "3.8 3.9 3.10", *NEWEST), env=machine.environment
    )
    wait_until(lambda: told.exists() or process.poll() is not None)
    assert told.exists()
    process.send_signal(number)
    assert process.wait() == 130
    assert [row[:3] for row in machine.table()] == [["3.8.18", "<2", "passed"]]
    wait_until(lambda: not runs(int(told.read_text())))
