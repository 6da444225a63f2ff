"""The examples for several processes, under a real mpirun, train as one process."""

import pathlib
import runpy
import sys

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from tests.support.mpi_jobs import ended, mpirun, needs_mpi, succeed

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
# Batches of 40, 40 and 1 samples; in the last one rank 1 has none.
SMALL = ["--dataset=synthetic", "--limit=81", "--batch-size=40", "--epochs=2"]
SEVERAL, SIX_STEPS = EXAMPLES / "several_processes.py", EXAMPLES / "six_steps.py"
CPU = {SEVERAL: ["--device=cpu"], SIX_STEPS: []}


def on_two_ranks(program, *options):
    return mpirun((2, [sys.executable, str(program), *SMALL, *CPU[program], *options]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of two ranks without a break, and what the run printed."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, succeed(on_two_ranks(SEVERAL, f"--save-dir={folder}"))[0]


def assert_trained_as(printed, checkpoint, program, capsys, *options):
    """One process with two devices, or one, prints the same and has the same parameters."""
    found = runpy.run_path(str(program))
    with mx.name.NameManager():  # layers are counted from 0, as in a process of its own
        words = [*SMALL, *CPU[program], *options]
        one = found["train"](found["parse"](words))
        ranks = found["train"](found["parse"]([*words, "--epochs=0"]))
    assert capsys.readouterr().out == printed.lstrip()  # mpirun may print a newline of its own
    gluonpar.load_checkpoint(checkpoint, ranks)
    for want, got in zip(one.collect_params().values(), ranks.collect_params().values()):
        for copy in want.list_data():  # float32 sums in another order, through six updates
            close = {"rtol": 0, "atol": 2e-5 * np.abs(copy.asnumpy()).max()}
            value = got.list_data()[0].asnumpy()
            np.testing.assert_allclose(value, copy.asnumpy(), **close)


@needs_mpi
def test_two_ranks_train_as_one_process_with_two_devices(whole, capsys):
    folder, printed = whole
    assert_trained_as(printed, folder / "epoch-2.ckpt", SEVERAL, capsys, "--num-gpus=2")


@needs_mpi
@pytest.mark.skipif(mx.context.num_gpus() > 0, reason="it is compared on CPUs")
def test_two_ranks_with_six_steps_train_as_one_process(tmp_path, capsys):
    saved = str(tmp_path / "two.ckpt")
    printed, _ = succeed(on_two_ranks(SIX_STEPS, f"--save={saved}"))
    assert_trained_as(printed, saved, SIX_STEPS, capsys)


@needs_mpi
def test_continuing_after_an_epoch_gives_the_bits_of_a_run_without_a_break(whole, tmp_path):
    folder, _ = whole
    (tmp_path / "epoch-1.ckpt").write_bytes((folder / "epoch-1.ckpt").read_bytes())
    out, _ = succeed(on_two_ranks(SEVERAL, f"--save-dir={tmp_path}", "--resume=1"))
    assert out.count("epoch 2, ") == 1 and "epoch 1, " not in out
    assert (tmp_path / "epoch-2.ckpt").read_bytes() == (folder / "epoch-2.ckpt").read_bytes()


@needs_mpi
def test_a_missing_checkpoint_ends_the_job_with_one_line(tmp_path):
    code, _, err = ended(on_two_ranks(SEVERAL, f"--save-dir={tmp_path}", "--resume=1"))
    assert code == 1 and "Traceback" not in err
    assert err.count(str(tmp_path / "epoch-1.ckpt")) == 1
