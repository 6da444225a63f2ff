"""tools/test_matrix.py, with pretended interpreters: shell scripts that answer like one."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import metadata
from pathlib import Path

import pytest
from processes import runs

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "test_matrix.py"
# What is on PATH; all of /usr/bin might hold a python3.11 too.
TOOLS = "make git dirname mkdir cp sed cut cat rm ls touch id grep sleep mv"

# It makes an environment by copying itself there, and "installs" what pip's constraint says. pip
# and pytest leave their arguments in the environment; pytest then says, and does, what it is told.
INTERPRETER = """#!/bin/sh
venv=$(dirname "$(dirname "$0")")
case "$1 $2 $3" in
"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m pip"*) echo "$@" >>"$venv/pip"; cp "$PIP_CONSTRAINT" "$venv/numpy"; {pip} ;;
"-m pytest"*) echo "$@" >"$venv/pytest"; {pytest} ;;
*metadata*) echo "$(sed 's/numpy[=<]*//' "$venv/numpy") mxnet 1.9.1" ;;
*"%d.%d.%d"*) echo {version} ;;
*"%d.%d"*) echo {version} | cut -d . -f 1,2 ;;
esac
"""
PASSES = 'echo "=== 7 passed, 2 skipped in 1.23s (0:00:01) ==="'
FAILS = 'echo "FAILED tests/a.py::b"; echo "1 failed, 5 passed, 2 skipped, 1 error in 9s"; exit 1'


@pytest.fixture
def machine(tmp_path):
    """Return a machine on which Python is what a test puts there."""
    return Machine(tmp_path)


class Machine:
    def __init__(self, folder: Path):
        self.bin, self.pyenv = folder / "bin", folder / "pyenv"
        self.bin.mkdir()
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.matrix = folder / "matrix"
        self.environment = {
            "PATH": str(self.bin),
            "PYENV_ROOT": str(self.pyenv),
            "HOME": str(folder),
        }

    def program(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(
        self, version: str, path: Path | None = None, pytest: str = PASSES, pip: str = ":"
    ) -> Path:
        text = INTERPRETER.format(version=version, pytest=pytest, pip=pip)
        return self.program(path or self.bin / f"python{version.rpartition('.')[0]}", text)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(SCRIPT), "--folder", str(self.matrix), *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*arguments), env=self.environment, capture_output=True, text=True
        )

    def table(self) -> list[list[str]]:
        """Return the rows of table.md below the headings, as lists of cells."""
        lines = (self.matrix / "table.md").read_text().splitlines()
        rows = [line[2:-2].split(" | ") for line in lines if line.startswith("|")]
        assert rows[0] == ["Python", "NumPy", "result", "passed", "skipped", "failed", "seconds"]
        assert rows[1] == ["---"] * 3 + ["---:"] * 4
        return rows[2:]


def test_each_interpreter_gets_its_oldest_numpy_and_the_newest(machine):
    machine.python("3.8.18")
    machine.python("3.12.1")
    done = machine.run("--pythons", "3.8 3.12")
    assert done.returncode == 0, done.stderr
    assert [row[:6] for row in machine.table()] == [
        ["3.8.18", "1.17.3", "passed", "7", "2", "0"],
        ["3.8.18", "2", "passed", "7", "2", "0"],  # the stand-in repeats the bound, < 2
        ["3.12.1", "1.26.0", "passed", "7", "2", "0"],
        ["3.12.1", "2", "passed", "7", "2", "0"],
    ]
    assert all(row[6].isdigit() for row in machine.table())
    assert (machine.matrix / "3.8.18-numpy-1.17.3.txt").read_text() == "numpy==1.17.3\n"
    assert (machine.matrix / "3.8.18-numpy-newest.txt").read_text() == "numpy<2\n"


@pytest.mark.parametrize(
    ("numpy", "bounds"), [("oldest", ["1.23.2"]), ("newest", ["2"]), ("1.25.1", ["1.25.1"])]
)
def test_numpy_can_be_chosen(machine, numpy, bounds):
    machine.python("3.11.7")
    assert machine.run("--pythons", "3.11", "--numpy", numpy).returncode == 0
    assert [row[1] for row in machine.table()] == bounds


def test_without_arguments_all_that_setup_py_allows_are_looked_for(machine):
    machine.python("3.10.13")
    assert machine.run("--numpy", "newest").returncode == 0
    rows = machine.table()
    assert sorted(row[0] for row in rows) == sorted(["3.8", "3.9", "3.10.13", "3.11", "3.12"])
    assert set(metadata("gluonpar")["Requires-Python"].split(",")) == {">=3.8", "<3.13"}


def test_an_interpreter_that_is_not_there_is_a_line_and_no_failure(machine):
    machine.python("3.9.18")
    done = machine.run("--pythons", "3.8 3.9", "--numpy", "newest")
    assert done.returncode == 0
    assert machine.table()[0] == ["3.8", "", "not found", "", "", "", ""]
    assert machine.table()[1][:3] == ["3.9.18", "2", "passed"]


def test_without_any_interpreter_it_ends_with_2_and_says_which(machine):
    done = machine.run("--pythons", "3.8 3.9 /no/such/python")
    assert done.returncode == 2
    assert "none of these is here: 3.8 3.9 /no/such/python" in done.stderr
    assert not machine.matrix.exists()


def test_a_failing_suite_is_counted_the_others_run_and_the_exit_code_is_1(machine):
    machine.python("3.8.18", pytest=FAILS)
    machine.python("3.9.18")
    done = machine.run("--pythons", "3.8 3.9", "--numpy", "newest")
    assert done.returncode == 1
    assert [row[:6] for row in machine.table()] == [
        ["3.8.18", "2", "FAILED", "5", "2", "2"],  # an error in a fixture is a failure
        ["3.9.18", "2", "passed", "7", "2", "0"],
    ]
    assert "FAILED tests/a.py::b" in (machine.matrix / "3.8.18-numpy-newest.log").read_text()


def test_a_suite_that_crashes_has_no_numbers_and_failed(machine):
    machine.python("3.8.18", pytest="echo 3 passed; echo tests/test_x.py::test_y; kill -SEGV $$")
    assert machine.run("--pythons", "3.8", "--numpy", "newest").returncode == 1
    assert machine.table()[0][:6] == ["3.8.18", "2", "FAILED", "", "", ""]


def test_an_environment_that_cannot_be_made_is_a_failure_and_the_others_run(machine):
    machine.python("3.8.18", pip="echo no wheel; exit 1")
    machine.python("3.9.18")
    assert machine.run("--pythons", "3.8 3.9", "--numpy", "oldest").returncode == 1
    assert [row[:3] for row in machine.table()] == [
        ["3.8.18", "1.17.3", "SET-UP FAILED"],
        ["3.9.18", "1.19.3", "passed"],
    ]
    assert "no wheel" in (machine.matrix / "3.8.18-numpy-1.17.3.log").read_text()


def test_a_second_run_keeps_the_environments_and_writes_its_own_table(machine):
    machine.python("3.8.18")
    installed = machine.matrix / "3.8.18-numpy-newest" / "pip"
    machine.run("--pythons", "3.8", "--numpy", "newest")
    calls = installed.read_text()
    assert ".[cpu,test]" in calls
    machine.run("--pythons", "3.8", "--numpy", "newest")
    assert installed.read_text() == calls
    assert len(machine.table()) == 1


def test_the_newest_of_pyenvs_is_taken_where_the_one_on_path_does_not_run(machine):
    machine.program(machine.bin / "python3.8", "#!/bin/sh\nexit 127\n")  # an inactive shim
    for version in ("3.8.9", "3.8.18", "3.8.2"):
        machine.python(version, machine.pyenv / "versions" / version / "bin" / "python")
    machine.run("--pythons", "3.8", "--numpy", "newest")
    assert machine.table()[0][0] == "3.8.18"


def test_a_program_of_another_version_than_its_name_says_is_not_taken(machine):
    machine.python("3.9.18", machine.bin / "python3.8")
    uv = machine.python("3.8.20", machine.bin.parent / "uv" / "python")
    answers = f'[ "$*" = "python find --system 3.8" ] && echo {uv}'
    machine.program(machine.bin / "uv", f"#!/bin/sh\n{answers}\n")
    machine.run("--pythons", "3.8", "--numpy", "newest")
    assert machine.table()[0][0] == "3.8.20"


def test_a_path_is_an_interpreter_too_if_gluonpar_runs_on_it(machine):
    good = machine.python("3.11.7", machine.bin.parent / "opt" / "python")
    new = machine.python("3.13.0", machine.bin.parent / "new" / "python")
    assert machine.run("--pythons", f"{good} {new}", "--numpy", "newest").returncode == 0
    assert [row[:3] for row in machine.table()] == [
        [str(new), "", "not found"],
        ["3.11.7", "2", "passed"],
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pythons", "3.13"), "Python 3.13: say 3.8, 3.9, 3.10, 3.11, 3.12, or a path"),
        (("--numpy", "old"), "--numpy old: say both, oldest, newest or a version"),
    ],
)
def test_what_makes_no_sense_ends_with_2_and_says_what_does(machine, arguments, words):
    done = machine.run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_which_tests_is_passed_on_to_pytest(machine):
    machine.python("3.8.18")
    machine.run("--pythons", "3.8", "--numpy", "newest", "-k", "ring or tree", "tests/test_a.py")
    told = (machine.matrix / "3.8.18-numpy-newest" / "pytest").read_text()
    assert told == "-m pytest -v -rfE -k ring or tree tests/test_a.py\n"


def test_the_table_says_when_and_of_what_it_is_and_is_printed(machine):
    machine.python("3.8.18")
    done = machine.run("--pythons", "3.8")
    text = (machine.matrix / "table.md").read_text()
    first = text.splitlines()[0]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d, mxnet 1\.9\.1, commit \w+( with changes)?", first)
    assert done.stdout.endswith(f"\n\n{text}")
    assert "[1/2]" in done.stdout
    assert "passed: 7 passed, 2 skipped, 0 failed in" in done.stdout


def test_the_variables_of_make_reach_the_script_and_not_the_make_inside(machine):
    machine.python("3.8.18")
    machine.environment["MAKEFLAGS"] = "n -- VENV=elsewhere"
    assert machine.run("--pythons", "3.8", "--numpy", "newest").returncode == 0
    assert (machine.matrix / "3.8.18-numpy-newest" / ".tests").exists()
    variables = ("PYTHON=python3", "PYTHONS=3.8 3.12", "EXTRA=cpu", "ARGS=--numpy oldest")
    told = subprocess.run(
        ["make", "-n", "--no-print-directory", "test-matrix", *variables],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert told.stdout.replace("\\\n", "").split() == [
        *("python3", "tools/test_matrix.py", "--pythons", "'3.8", "3.12'", "--extra", "cpu"),
        *("--numpy", "oldest"),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_of_it_with_130_and_the_table_of_what_had_ended(machine, tmp_path, number):
    machine.python("3.8.18")
    # What a shell starts in the background has SIGINT ignored.
    waits = f"sleep 600 & echo $! >{tmp_path}/pid; mv {tmp_path}/pid {tmp_path}/told; wait"
    machine.python("3.9.18", pytest=waits)
    machine.python("3.10.13")
    process = subprocess.Popen(
        machine.command("--pythons", "3.8 3.9 3.10", "--numpy", "newest"), env=machine.environment
    )
    while not (tmp_path / "told").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait() == 130
    assert [row[:3] for row in machine.table()] == [["3.8.18", "2", "passed"]]
    assert not runs(int((tmp_path / "told").read_text()))
