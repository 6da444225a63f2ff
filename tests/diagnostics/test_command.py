"""The command gluonpar: its list, its names in messages, and what does without MXNet."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gluonpar
from gluonpar import __main__
from gluonpar.__main__ import COMMANDS
from gluonpar.diagnostics import self_test
from tests.support import commands
from tests.support.processes import end

PACKAGES = Path(gluonpar.__file__).resolve().parents[1]


@pytest.fixture
def without_mxnet(tmp_path):
    """without_mxnet(form, *arguments): run the command where importing MXNet or NumPy fails."""
    for name in ("mxnet", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('{name} is broken')")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "gluonpar"  # as pip writes it
    script.write_text("import sys\nfrom gluonpar.__main__ import main\nsys.exit(main())\n")
    forms = {"script": [script], "module": ["-m", "gluonpar"]}
    path = os.pathsep.join([str(tmp_path), str(PACKAGES)])

    def run(form, *arguments):
        return end(*forms.get(form, [form]), *arguments, cwd=tmp_path / "bin", PYTHONPATH=path)

    return run


@pytest.fixture
def command(capsys):
    return commands.runner(__main__, capsys)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_without_a_command_all_are_listed_with_a_way_to_start(arguments, command):
    code, out, _ = command(*arguments)
    out = "\n".join(out)
    assert code == 0
    assert all(f"  {name} " in out and kind.title in out for name, kind in COMMANDS.items())
    assert "gluonpar train --num-gpus 2" in out


@pytest.mark.parametrize("called", [*COMMANDS, "verify"])
def test_the_help_of_every_command_has_examples_and_exit_codes(called, command):
    name = "selftest" if called == "verify" else called
    _, lines, _ = command("help", called)
    examples, codes = lines.index("examples:"), lines.index("exit codes:")
    assert all(line.startswith(f"  gluonpar {name}") for line in lines[examples + 1 : codes - 1])
    assert lines[codes + 1].split()[0] == "0" and len(lines[codes:]) > 2


@pytest.mark.parametrize("form", ["script", "module"])
def test_what_needs_no_mxnet_does_not_import_it_and_the_others_say_what_to_do(without_mxnet, form):
    assert without_mxnet(form, "--version").stdout == f"gluonpar {gluonpar.__version__}\n"
    for arguments in ((), ("--help",), ("help",), ("help", "doctor"), ("help", "train")):
        done = without_mxnet(form, *arguments)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(
            "usage: gluonpar"
        )
    for arguments, prefix, meant in (
        (("trian",), "gluonpar", "'trian'; start with one of train, bench,"),
        (("--num-gpus=2",), "gluonpar", "start with one of train, bench,"),
        (("doctor", "--frob"), "gluonpar doctor", "--frob\n"),
        (("train", "--lr", "0"), "gluonpar train", "--lr must be a positive"),
        (
            ("train", "--weights", "-1,2"),
            "gluonpar train",
            "--weights must be a positive finite number, got -1.0",
        ),
        (("bench", "--factor", "1"), "gluonpar bench", "--factor must be at least 2"),
        (("selftest", "--num-gpus", "99"), "gluonpar selftest", "--num-gpus must be between 1"),
    ):
        done = without_mxnet(form, *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith(f"{prefix}: error: ")
        assert meant in done.stderr
    for arguments in (("train", "--num-gpus", "2"), ("bench",), ("verify", "--num-gpus", "2")):
        done = without_mxnet(form, *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert re.match("gluonpar (train|bench|selftest): error: .*numpy is broken", done.stderr)


@pytest.mark.parametrize("name", ["program.py", "gluonpar.py"])
def test_another_program_gets_the_exception(without_mxnet, tmp_path, name):
    (tmp_path / "bin" / name).write_text("import sys\ndel sys.path[0]\nfrom gluonpar import sgd")
    done = without_mxnet(tmp_path / "bin" / name, "doctor")
    assert done.returncode == 1 and "ImportError: numpy is broken" in done.stderr


@pytest.mark.parametrize("model", ["lenet", "resnet18"])
def test_a_script_trains_the_network_of_its_name_only(model):
    script = PACKAGES / "scripts" / f"train_{model}.py"
    other = {"lenet": "resnet18", "resnet18": "lenet"}[model]
    done = end(script, "--model", other)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"train_{model}.py: error: --model must be {model} here")
    done = end(script, "--epochs", "0")
    assert done.stderr == f"train_{model}.py: error: --epochs must be at least 1, got 0\n"


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch, command):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(self_test, "run", interrupted)
    code, _, err = command("selftest", "--device", "cpu")
    assert (code, err) == (130, ["", "gluonpar selftest: interrupted"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--max-bytes", "4K", "--iters", "1", "--algorithms", "host"),
        ("--help",),
        ("train", "--help"),
        ("--version",),
        pytest.param(("selftest",), marks=pytest.mark.slow),
        pytest.param(("doctor",), marks=pytest.mark.slow),
    ],
)
def test_output_that_cannot_be_written_ends_a_command_without_a_traceback(arguments):
    """Into a pipe that nobody reads, and onto a full disk."""
    read, write = os.pipe()
    os.close(read)
    arguments = [sys.executable, "-m", "gluonpar", *arguments]
    arguments += ["--device", "cpu"] if {"bench", "selftest"} & {*arguments} else []
    full = os.open("/dev/full", os.O_WRONLY)
    for stdout, code, words in ((write, 141, ""), (full, 2, r"gluonpar.*No space left.*\n")):
        done = subprocess.run(arguments, stdout=stdout, stderr=subprocess.PIPE, text=True)
        os.close(stdout)
        assert done.returncode == code and re.fullmatch(words, done.stderr), done.stderr
