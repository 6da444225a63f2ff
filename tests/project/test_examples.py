"""The examples: three ways of summing gradients train alike, and a loop by hand converges."""

from __future__ import annotations

import runpy
from pathlib import Path

import mxnet as mx
import numpy as np
import processes
import pytest

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


def test_every_epoch_has_all_samples_in_another_order():
    sampler = runpy.run_path(str(PROGRAM))["Shuffled"](7, 3, seed=0)
    epochs = []
    for sampler.epoch in (1, 2):
        items = [item for (item,) in sampler]
        assert len(items) == len(sampler) == 3 and len({seed for seed, _ in items}) == 3
        epochs.append(np.concatenate([indices for _, indices in items]).tolist())
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(7)) and epochs[0] != epochs[1]


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


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("six_steps", "--batch-size", "0"),
        ("six_steps", "--limit", "-1"),
        ("six_steps", "--save", "absent/a.ckpt"),
        ("several_processes", "--num-gpus", "0"),
        ("several_processes", "--batch-size", "0"),
        ("several_processes", "--save-dir", "/dev/null/out"),
        ("training_loop", "--num-gpus", "0"),
        ("training_loop", "--batch-size", "0"),
        ("training_loop", "--save-dir", "/dev/null/out"),
    ],
)
def test_an_option_that_cannot_be_met_ends_the_program_with_one_line(name, option, value, capsys):
    parse = runpy.run_path(str(EXAMPLES / f"{name}.py"))["parse"]
    with pytest.raises(SystemExit) as ended:
        parse([option, value])
    *_, line = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and option in line and value in line


@pytest.mark.slow
def test_the_custom_loop_converges(tmp_path):
    done = processes.end(EXAMPLES / "custom_loop.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "w = [ 2.  -3.4], b = 4.20\n"), done.stderr
