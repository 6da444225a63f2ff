"""The examples train alike on any devices and ranks, and in each way of summing gradients."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from tests.support import processes
from tests.support.mpi_jobs import mpirun, needs_mpi, succeed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAM = EXAMPLES / "training_loop.py"
WAYS = ("trainer", "kvstore", "by-hand")
# Steps of 40, 40 and one sample: fewer than devices.
SMALL = ["--dataset=synthetic", "--limit=81", "--batch-size=40", "--epochs=2", "--device=cpu"]


def run(sums, num_devices, *options):
    """Run the program in this process; return its parameters on the last device, in order."""
    found, options = runpy.run_path(str(PROGRAM)), [f"--sums={sums}", *options]
    with mx.name.NameManager():  # layers are counted from 0, as in a process of its own
        net = found["train"](found["parse"]([*SMALL, f"--num-gpus={num_devices}", *options]))
    return [param.list_data()[-1].asnumpy() for param in net.collect_params().values()]


def same_bits(some, others):
    return [a.tobytes() for a in some] == [b.tobytes() for b in others]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """By way, the parameters after two epochs on two devices, and the folder of the files."""
    folders = {name: tmp_path_factory.mktemp(name) for name in WAYS}
    return {name: (run(name, 2, f"--save-dir={path}"), path) for name, path in folders.items()}


def test_the_three_end_with_the_same_bits(finished):
    first, *others = (finished[way][0] for way in WAYS)
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("way", WAYS)
def test_continuing_after_an_epoch_gives_the_bits_of_a_run_without_a_break(way, finished):
    want, folder = finished[way]
    assert same_bits(run(way, 2, f"--save-dir={folder}", "--resume=1"), want)


def test_two_devices_train_as_one(finished):
    """Tolerance: rounding of float32 through six updates."""
    for got, want in zip(finished["trainer"][0], run("trainer", 1)):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.slow
def test_worker_processes_change_no_bit(finished, tmp_path):
    options = [*SMALL, f"--save-dir={tmp_path}", "--num-workers=2"]
    done = processes.end(PROGRAM, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    want = finished["trainer"][1] / "epoch-2.ckpt"
    assert (tmp_path / "epoch-2.ckpt").read_bytes() == want.read_bytes()


FINE_TUNING = ["--device=cpu", "--limit=61", "--batch-size=20", "--epochs=2"]
LANGUAGE = ["--device=cpu", "--units=16", "--batch-size=9", "--length=20", "--epochs=2"]


def history(name, num_devices, options):
    """Run an example in this process; return what it measured in each epoch."""
    found = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    net, measured = found["train"](found["parse"]([*options, f"--num-gpus={num_devices}"]))
    for param in net.collect_params().values():  # all devices have the same
        assert len({copy.asnumpy().tobytes() for copy in param.list_data()}) == 1
    return measured


def test_fine_tuning_trains_the_last_layer_on_two_devices_as_on_one_and_then_the_rest():
    """With all layers it does not: batch normalisation takes the statistics of each device."""
    two, one = (history("fine_tuning", k, FINE_TUNING) for k in (2, 1))
    np.testing.assert_allclose(two[:2], one[:2], rtol=1e-5)
    assert two[-1] < two[0] / 2 and one[-1] < one[0] / 2


def test_the_language_model_trains_on_two_devices_as_on_one():
    """Tolerance: rounding of float32 through 300 updates."""
    two, one = (history("language_model", k, LANGUAGE) for k in (2, 1))
    np.testing.assert_allclose(two, one, rtol=1e-3)
    assert two[1] < two[0] < 10


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("fine_tuning", [*FINE_TUNING[:-1], "--epochs=1"]), ("language_model", LANGUAGE)],
)
def test_two_ranks_print_what_one_process_prints(name, options, capsys):
    """Of fine-tuning, for the last layer: see above."""
    program = str(EXAMPLES / f"{name}.py")
    printed, _ = succeed(mpirun((2, [sys.executable, program, *options])))
    history(name, 1, options)
    lines = capsys.readouterr().out.splitlines()
    same = sum(not line.startswith("all") for line in lines)
    assert same and printed.lstrip().split("\n")[:same] == lines[:same]


# They are tried after the data have been loaded, and Fashion-MNIST need not be there.
WITH_DATA = ("--limit", "--save", "--save-dir")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("six_steps", "--batch-size", "0"),
        ("six_steps", "--limit", "-1"),
        ("six_steps", "--limit", "60001"),
        ("six_steps", "--save", "absent/a.ckpt"),
        ("several_processes", "--num-gpus", "0"),
        ("several_processes", "--batch-size", "0"),
        ("several_processes", "--limit", "60001"),
        ("several_processes", "--save-dir", "/dev/null/out"),
        ("fine_tuning", "--num-gpus", "0"),
        ("fine_tuning", "--batch-size", "0"),
        ("language_model", "--num-gpus", "0"),
        ("language_model", "--batch-size", "0"),
        ("language_model", "--data", "absent.txt"),
        ("training_loop", "--num-gpus", "0"),
        ("training_loop", "--batch-size", "0"),
        ("training_loop", "--limit", "60001"),
        ("training_loop", "--save-dir", "/dev/null/out"),
    ],
)
def test_an_option_that_cannot_be_met_ends_the_program_with_one_line(name, option, value, capsys):
    parse = runpy.run_path(str(EXAMPLES / f"{name}.py"))["parse"]
    with pytest.raises(SystemExit) as ended:
        parse([*["--dataset=synthetic"] * (option in WITH_DATA), option, value])
    *_, line = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and option in line and value in line


@pytest.mark.slow
def test_the_custom_loop_converges(tmp_path):
    done = processes.end(EXAMPLES / "custom_loop.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "w = [ 2.  -3.4], b = 4.20\n"), done.stderr
