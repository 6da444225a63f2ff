"""The three training loops: one program but for the marked lines, which train alike.

test_docs.py compares the code that docs/training-loop.md quotes with these files.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import mxnet as mx
import numpy as np
import processes
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("loop_trainer", "loop_kvstore", "loop_by_hand")
REGION = re.compile(r"^ *# differs: .*\n(?:.*\n)*? *# end\n", re.M)
# Steps of 40, 40 and 23 samples, so each device's share is another one in the last step.
SMALL = ["--dataset=synthetic", "--limit=103", "--batch-size=40", "--epochs=2", "--device=cpu"]


def source(program):
    return (ROOT / "examples" / f"{program}.py").read_text("utf-8")


def run(program, num_devices, *options):
    """Run a program in this process; return its parameters on the last device, in their order."""
    found = runpy.run_path(str(ROOT / "examples" / f"{program}.py"))
    with mx.name.NameManager():  # layers are counted from 0, as in a process of its own
        net = found["train"](found["parse"]([*SMALL, f"--num-gpus={num_devices}", *options]))
    return [param.list_data()[-1].asnumpy() for param in net.collect_params().values()]


def same_bits(some, others):
    return [a.tobytes() for a in some] == [b.tobytes() for b in others]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Each program's parameters after two epochs on two devices, and the folder of its files."""
    folders = {name: tmp_path_factory.mktemp(name) for name in PROGRAMS}
    return {name: (run(name, 2, f"--save-dir={path}"), path) for name, path in folders.items()}


def test_the_programs_differ_in_the_marked_lines_only():
    def rest(text):
        body = REGION.sub(lambda region: region[0].partition("\n")[0], text)
        return body.partition('"""\n\n')[2]  # without the docstring

    first, *others = map(source, PROGRAMS)
    assert len(REGION.findall(first)) == 4
    assert [rest(other) for other in others] == [rest(first)] * 2


def test_the_three_end_with_the_same_bits(finished):
    first, *others = (finished[program][0] for program in PROGRAMS)
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("program", PROGRAMS)
def test_continuing_after_an_epoch_gives_the_bits_of_a_run_without_a_break(program, finished):
    want, folder = finished[program]
    assert same_bits(run(program, 2, f"--save-dir={folder}", "--resume=1"), want)


def test_a_last_batch_with_fewer_samples_than_devices():
    first, *others = (run(program, 2, "--limit=81") for program in PROGRAMS)
    assert all(same_bits(first, other) for other in others)


def test_every_epoch_has_all_samples_in_another_order():
    sampler = runpy.run_path(str(ROOT / "examples" / "loop_trainer.py"))["Shuffled"](7, 3, seed=0)
    epochs = []
    for sampler.epoch in (1, 2):
        items = [item for (item,) in sampler]
        assert len(items) == len(sampler) == 3 and len({seed for seed, _ in items}) == 3
        epochs.append(np.concatenate([indices for _, indices in items]).tolist())
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(7)) and epochs[0] != epochs[1]


def test_two_devices_train_as_one(finished):
    """Tolerance: rounding of float32 through six updates."""
    for got, want in zip(finished["loop_trainer"][0], run("loop_trainer", 1)):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.slow
def test_worker_processes_change_no_bit(finished, tmp_path):
    options = [*SMALL, f"--save-dir={tmp_path}", "--num-workers=2"]
    done = processes.end(ROOT / "examples" / "loop_trainer.py", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    want = finished["loop_trainer"][1] / "epoch-2.ckpt"
    assert (tmp_path / "epoch-2.ckpt").read_bytes() == want.read_bytes()
