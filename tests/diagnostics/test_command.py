"""The command gluonpar: its list, its names in messages, and what does without MXNet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import end

import gluonpar
from gluonpar.__main__ import COMMANDS, main
from gluonpar.diagnostics import self_test

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


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_without_a_command_all_are_listed_with_a_way_to_start(arguments, capsys):
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    out = capsys.readouterr().out
    assert code == 0
    assert all(f"  {name} " in out and about in out for name, (_, about) in COMMANDS.items())
    assert "gluonpar train --num-gpus 2" in out


@pytest.mark.parametrize("called", [*COMMANDS, "verify"])
def test_the_help_of_every_command_has_examples_and_exit_codes(called, capsys):
    name = "selftest" if called == "verify" else called
    with pytest.raises(SystemExit):
        main(["help", called])
    lines = capsys.readouterr().out.splitlines()
    examples, codes = lines.index("examples:"), lines.index("exit codes:")
    assert all(line.startswith(f"  gluonpar {name}") for line in lines[examples + 1 : codes - 1])
    assert lines[codes + 1].split()[0] == "0" and len(lines[codes:]) > 2


@pytest.mark.parametrize("form", ["script", "module"])
def test_what_needs_no_mxnet_does_not_import_it_and_the_others_say_what_to_do(without_mxnet, form):
    assert without_mxnet(form, "--version").stdout == f"gluonpar {gluonpar.__version__}\n"
    for arguments in ((), ("--help",), ("help",), ("doctor", "--help"), ("help", "doctor")):
        done = without_mxnet(form, *arguments)
        assert (done.returncode, done.stderr) == (0, "") and "doctor" in done.stdout
    for arguments, prefix, meant in (
        (("trian",), "gluonpar", "start with one of train, bench,"),
        (("--num-gpus=2",), "gluonpar", "start with one of train, bench,"),
        (("doctor", "--frob"), "gluonpar doctor", "--frob\n"),
    ):
        done = without_mxnet(form, *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith(f"{prefix}: error: ") and arguments[-1] in done.stderr
        assert meant in done.stderr
    for arguments in (("train", "--num-gpus", "2"), ("help", "train")):
        done = without_mxnet(form, *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert (
            done.stderr.startswith("gluonpar train: error: ") and "numpy is broken" in done.stderr
        )


@pytest.mark.parametrize("name", ["program.py", "gluonpar.py"])
def test_another_program_gets_the_exception(without_mxnet, tmp_path, name):
    (tmp_path / "bin" / name).write_text("import sys\ndel sys.path[0]\nimport gluonpar")
    done = without_mxnet(tmp_path / "bin" / name, "doctor")
    assert done.returncode == 1 and "ImportError: numpy is broken" in done.stderr


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(self_test, "run", interrupted)
    assert main(["selftest", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "\ngluonpar selftest: interrupted\n"


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
