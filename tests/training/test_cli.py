"""The command line: output, files and exit codes; errors are one line that names the value."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import pytest

from gluonpar.install import driver
from gluonpar.training import Run, command_line
from gluonpar.training.data import dataset
from tests.support import commands

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_lenet.py"
ON_CPU = ("--dataset", "synthetic", "--device", "cpu")
SMALL = (*ON_CPU, "--limit", "96", "--batch-size", "32", "--epochs", "1")


@pytest.fixture
def command(capsys):
    return commands.runner(command_line, capsys)


@pytest.fixture
def no_gpu(monkeypatch):
    def missing():
        raise driver.DriverError("no NVIDIA driver here")

    monkeypatch.setattr(driver, "gpus", missing)
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 0)


def test_a_run_prints_its_settings_epochs_and_result(command):
    code, out, err = command(*SMALL, "--num-gpus", 2, "--num-epochs", 2, "--lr", 0.1, "--seed", 5)
    assert (code, err) == (0, [])
    header, epochs = "\n".join(out[:-3]), out[-3:-1]
    values = "mxnet 1.;[cpu(0), cpu(1)];32 in all, 16;host: ;96 training and 96 test;lr 0.1, seed 5"
    assert [value for value in values.split(";") if value not in header] == []
    figures = r"time [\d.]+ sec, loss \d\.\d{3}, test acc [01]\.\d\d, \d+ images/sec"
    assert all(re.fullmatch(f"epoch {i}, {figures}", line) for i, line in enumerate(epochs, 1))
    assert re.match(r"test acc: [01]\.\d\d, [\d.]+ sec/epoch on \[cpu\(0\), cpu\(1\)\]$", out[-1])


HEADERS = {
    "--batch-size 32 --num-gpus 3": "batch size: 32 in all, 10 or 11 on each device",
    "--batch-size 2 --num-gpus 4": "batch size: 2 in all, 1 on each of 2 devices, none on 2",
    "--limit 3 --num-gpus 4": "batch size: 3 in all, 1 on each of 3 devices, none on 1",
    "--batch-size 1": "batch size: 1 in all, 1 on each device",
    "--batch-size 18 --num-gpus 3 --weights 1,2.5,1": "batch size: 18 in all, 4, 10, 4 on the "
    "devices by weight",
    "--batch-size 2 --num-gpus 3 --weights 1,2.5,1": "batch size: 2 in all, 1 on each of 2 "
    "devices, none on 1",
    "--num-gpus 2 --algorithm star": "all-reduce: star",
    "--num-gpus 2 --allreduce star": "all-reduce: star",
}


@pytest.mark.parametrize("options", HEADERS)
def test_the_header_has_the_shards_sizes_and_the_all_reduce(command, options):
    code, out, err = command(*ON_CPU, *options.split(), "--dry-run")
    assert (code, err) == (0, [])
    assert HEADERS[options] in out


def test_log_interval_prints_the_loss_every_n_batches(command):
    _, out, _ = command(*SMALL, "--epochs", 2, "--batch-size", 16, "--log-interval", 2)
    logged = [line for line in out if "batch " in line and line.startswith("epoch")]
    assert [line.rpartition(", loss ")[0] for line in logged] == [
        f"epoch {epoch}, batch {batch}/6" for epoch in (1, 2) for batch in (2, 4, 6)
    ]
    assert all(re.fullmatch(r"\d\.\d{3}", line.rpartition(" ")[2]) for line in logged)


def test_a_dry_run_takes_one_step_and_keeps_nothing(command, tmp_path):
    plot = tmp_path / "lenet.png"
    code, out, err = command(*SMALL, "--dry-run", "--save-dir", tmp_path, "--plot", plot)
    assert (code, err) == (0, [])
    assert re.match(r"dry run: 1 of 3 batches .*loss 2\.", out[-1])
    assert list(tmp_path.iterdir()) == []


def test_auto_without_gpus_prints_one_notice(command, no_gpu):
    code, out, err = command("--dataset", "synthetic", "--num-gpus", 2, "--dry-run")
    assert code == 0
    [notice] = err
    assert "using 2 CPU devices" in notice and "gluonpar doctor" in notice
    assert any(line.startswith("devices: [cpu(0), cpu(1)]") for line in out)


BAD_REQUESTS = {
    "--num-gpus 0": "--num-gpus must be at least 1, got 0",
    "--device gpu": "--device gpu, .*no NVIDIA driver here",
    "--gpus 7": r"--gpus \[7\].*no NVIDIA driver here",
    "--device tpu": "'tpu'",
    "--lr 0": r"--lr must.*\b0",
    "--epochs 0": "--epochs .*got 0",
    "--device cpu --resume missing.npz": "missing.npz does not exist",
    "--device cpu --resume /missing/folder": "/missing/folder does not exist",
    "--device cpu --algorithm nccl": r"--algorithm nccl .*GPU contexts only, got cpu\(0\)",
    "--dataset mnist": "'mnist'",
    "--frobnicate": "--frobnicate",
    "--device cpu --num-gpus 2 --weights 1,2,3": r"weights.*\[1.0, 2.0, 3.0\].* 2 ",
    "--device cpu --num-gpus 2 --weights 1,0": "--weights must be a positive finite .*got 0.0",
    "--resume": "resume .*--save-dir",
    "--onnx": "--onnx .*--save-dir",
    "--save-every 3": "--save-every .*--save-dir",
    "--keep 4": "--keep .*--save-dir",
    "--device cpu --limit 6001": "--limit .*6000.*got 6001",
    "--device cpu --data-dir /some/folder": "--data-dir /some/folder$",
    "--device cpu --plot lenet.xyz": "plot to lenet.xyz",
    "--device cpu --plot /absent/lenet.png": "--plot /absent/lenet.png cannot be written: No such",
    f"--device cpu --plot {__file__}/below.png": "test_cli.py/below.png cannot be written: Not a",
    "--device cpu --num-gpus 999 --profile": r"cpu\(\d+\) cannot be profiled",
    f"--device cpu --save-dir {__file__}/below": "test_cli.py/below",
    f"--device cpu --save-dir {__file__}": "test_cli.py: File exists",
    "--device cpu --save-dir /dev/null": "/dev/null: File exists",
    "--device cpu --resume /dev/null": "/dev/null is another file",
    "--device cpu --limit 1 --early-stop 2": "--early-stop needs at least 2 .*got 1",
}


@pytest.mark.parametrize("arguments", BAD_REQUESTS)
def test_a_bad_request_is_2_and_one_line_with_the_value(command, no_gpu, arguments):
    code, out, err = command("--dataset", "synthetic", *arguments.split(" "))
    assert (code, out) == (2, [])
    [line] = [line for line in err if "error:" in line]
    assert line == err[-1]
    assert re.search(BAD_REQUESTS[arguments], line), line


def test_missing_data_is_2_and_names_the_folder_and_the_alternatives(command, tmp_path):
    code, out, err = command("--device", "cpu", "--data-dir", tmp_path)
    assert (code, out) == (2, [])
    for words in (str(tmp_path), "--data-dir", "--dataset synthetic"):
        assert words in "\n".join(err)


def test_a_folder_where_a_checkpoint_would_be_is_refused(command, tmp_path):
    (tmp_path / "lenet-epoch-0002.npz").mkdir()
    code, out, [line] = command(*SMALL, "--save-dir", tmp_path)
    assert (code, out) == (2, []) and "0002.npz is in the way" in line and "--save-dir" in line


@pytest.mark.parametrize(
    ("lr", "what"), [("1e30", "nan|inf|infinite or NaN"), ("1e6", r"rose to [\d.]+e\+\d\d")]
)
def test_divergence_has_its_exit_code_and_names_batch_epoch_and_lr(command, lr, what):
    code, _, err = command(*SMALL, "--lr", lr, "--batch-size", 16)
    assert code == 5
    [line] = err
    assert re.search(f"({what}) .*batch [2-6] of 6, epoch 1, with --lr .*, such as 0.2", line)


def test_the_last_update_of_a_run_may_be_the_one_that_diverges(command):
    code, _, [line] = command(*SMALL, "--lr", "1e9", "--epochs", 1, "--batch-size", 96)
    assert code == 5 and "a parameter rose to " in line


def raising(error):
    def function(*_):
        raise error

    return function


@pytest.mark.parametrize("error", [RuntimeError, ValueError, FileNotFoundError, ArithmeticError])
def test_an_exception_while_training_reaches_the_caller(monkeypatch, command, error):
    """Also one that would be about the options before training."""
    monkeypatch.setattr(Run, "train", raising(error("a bug")))
    with pytest.raises(error, match="a bug"):
        command(*SMALL)


@pytest.mark.parametrize("where", [(Run, "train"), (dataset, "load")])
def test_an_interruption_that_saved_nothing_is_130(monkeypatch, command, where):
    monkeypatch.setattr(*where, raising(KeyboardInterrupt()))
    code, _, err = command(*SMALL)
    assert code == 130
    assert re.search("interrupted; nothing .*--save-dir", err[-1])


def test_the_script_without_the_package_names_the_remedy():
    done = subprocess.run([sys.executable, "-I", "-S", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install -e '.[cpu]'" in done.stderr and "Traceback" not in done.stderr


# Odd values: accepted, or refused in one line with the option or the value; never a traceback.

ODD_NUMBERS = ["0", "-1", "2.5", "1e3", "nan", "inf", "1e400", "0x10", "\u0663", "1,2", "1,,2"]
ODD_NUMBERS += ["", " ", "None", "%s", "{}", "9" * 23, "9" * 5000]
ODD_PATHS = ["", ".", "folder", "file", "file/below", "file.png", "pipe", "loop.png", "full.png"]
ODD_PATHS += ["/dev/null", "new/deep", "/proc/new", "a" * 250, "a" * 300, "a" * 250 + ".png"]
FLAGS_WITH_NUMBERS = """--num-gpus --gpus --weights --batch-size --lr --epochs --seed --limit
                        --log-interval --save-every --keep --algorithm
                        --early-stop""".split()
FLAGS_WITH_PATHS = "--save-dir --resume --plot --data-dir".split()


def assert_accepted_or_refused_by_name(command, flag, value, *more):
    # The limit, as the largest --batch-size is accepted: one batch of all images.
    sizes = ["--batch-size", 2, "--limit", 100]
    code, _, err = command(*ON_CPU, *sizes, "--dry-run", f"{flag}={value}", *more)
    assert code in (0, 2)
    if code == 2:
        [line] = [line for line in err if "error: " in line]
        assert flag in line or value in line, line


@pytest.mark.parametrize("flag", FLAGS_WITH_NUMBERS)
def test_odd_numbers_are_accepted_or_refused_by_name(command, no_gpu, flag, tmp_path):
    for value in ODD_NUMBERS:
        assert_accepted_or_refused_by_name(command, flag, value, "--save-dir", tmp_path)


@pytest.mark.parametrize("flag", FLAGS_WITH_PATHS)
def test_odd_paths_are_accepted_or_refused_by_name(command, flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("file", "file.png"):
        Path(name).write_bytes(bytes(100))
    Path("folder").mkdir()
    os.mkfifo("pipe")
    os.symlink("/dev/full", "full.png")
    os.symlink("loop.png", "loop.png")
    before = sorted(tmp_path.iterdir())
    for value in ODD_PATHS:
        assert_accepted_or_refused_by_name(command, flag, value)
    assert flag == "--save-dir" or sorted(tmp_path.iterdir()) == before
    assert Path("file").read_bytes() == Path("file.png").read_bytes() == bytes(100)
