"""The command gluonpar: its list, its names in messages, and what does without MXNet."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import end

import gluonpar
from gluonpar.__main__ import COMMANDS, main
from gluonpar.diagnostics import harness, self_test

PACKAGES = Path(gluonpar.__file__).resolve().parents[1]
CONSOLE_SCRIPT = "import sys\nfrom gluonpar.__main__ import main\nsys.exit(main())\n"  # as pip's


@pytest.fixture
def without_mxnet(tmp_path):
    """without_mxnet(form, *arguments): run the command where importing MXNet or NumPy fails."""
    for name in ("mxnet", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('{name} is broken')")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "gluonpar"
    script.write_text(CONSOLE_SCRIPT)
    forms = {"gluonpar": [script], "python -m gluonpar": ["-m", "gluonpar"]}
    path = os.pathsep.join([str(tmp_path), str(PACKAGES)])

    def run(form, *arguments):
        return end(*forms.get(form, [form]), *arguments, cwd=tmp_path / "bin", PYTHONPATH=path)

    return run


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_without_a_command_all_are_listed_with_a_way_to_start(arguments, capsys):
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    out = capsys.readouterr().out
    assert code == 0
    assert all(f"  {name} " in out and summary in out for name, summary in COMMANDS.items())
    assert "gluonpar train --num-gpus 2" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_examples_and_exit_codes(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    examples, codes = lines.index("examples:"), lines.index("exit codes:")
    assert all(line.startswith(f"  gluonpar {name}") for line in lines[examples + 1 : codes - 1])
    assert lines[codes + 1].split()[0] == "0" and len(lines[codes:]) > 2


def test_verify_is_another_name_of_selftest(capsys):
    helps = []
    for arguments in (["selftest", "--help"], ["verify", "--help"], ["help", "verify"]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        helps.append(capsys.readouterr().out)
    assert len(set(helps)) == 1 and "gluonpar selftest [-h]" in helps[0]


@pytest.mark.parametrize("form", ["gluonpar", "python -m gluonpar"])
def test_what_needs_no_mxnet_does_not_import_it_and_the_others_say_what_to_do(without_mxnet, form):
    assert without_mxnet(form, "--version").stdout == f"gluonpar {gluonpar.__version__}\n"
    for arguments in ((), ("--help",), ("help",), ("doctor", "--help"), ("help", "doctor")):
        done = without_mxnet(form, *arguments)
        assert (done.returncode, done.stderr) == (0, "") and "doctor" in done.stdout
    for arguments, prefix, meant in (
        (("trian",), form, "did you mean train?"),
        (("--versoin",), form, "did you mean --version?"),
        (("--num-gpus=2",), form, "start with one of train, bench,"),
        (("doctor", "--jsn"), f"{form} doctor", "did you mean --json?"),
        (("doctor", "--frob"), f"{form} doctor", "--frob\n"),
    ):
        done = without_mxnet(form, *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith(f"{prefix}: error: ") and arguments[-1] in done.stderr
        assert meant in done.stderr
    for arguments in (("train", "--num-gpus", "2"), ("help", "train")):
        done = without_mxnet(form, *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"{form} train: error: ") and "numpy is broken" in done.stderr


def test_another_program_gets_the_exception(without_mxnet, tmp_path):
    (tmp_path / "program.py").write_text("import gluonpar")
    done = without_mxnet(tmp_path / "program.py", "doctor")
    assert done.returncode == 1 and "ImportError: numpy is broken" in done.stderr


@pytest.mark.parametrize("module", ["mxnet", "gluonpar.gluon"])
def test_ctrl_c_during_an_import_prints_nothing_unless_in_another_program(tmp_path, module):
    """The process ends by the signal, which a shell shows as exit code 130."""
    finder = "import sys\nclass Interrupt:\n    def find_spec(name, *_):\n"
    finder += f"        if name == {module!r}:\n            raise KeyboardInterrupt\n"
    finder += "sys.meta_path.insert(0, Interrupt)\n"
    for name, program in (("gluonpar", CONSOLE_SCRIPT), ("program.py", "import gluonpar\n")):
        (tmp_path / name).write_text(finder + program)
        done = end(tmp_path / name, "train")
        assert done.returncode == -signal.SIGINT
        assert ("Traceback" in done.stderr) == (name == "program.py")


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(self_test, "run", interrupted)
    monkeypatch.setattr(harness, "Record", interrupted)  # before anything is measured
    for command in ("selftest", "bench"):
        assert main([command, "--device", "cpu"]) == 130
        err = capsys.readouterr().err
        assert err.count("\n") == 2 and f"{command}: interrupted" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--max-bytes", "4K", "--iters", "1", "--algorithms", "host"),
        pytest.param(("selftest",), marks=pytest.mark.slow),
        pytest.param(("doctor",), marks=pytest.mark.slow),
    ],
)
def test_output_that_nobody_reads_ends_a_command_with_141_and_no_traceback(arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "gluonpar", *arguments]
    command += ["--device", "cpu"] if arguments != ("doctor",) else []
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
