"""examples/several_processes.py under a real mpirun: trains as one process, and continues."""

import pathlib
import runpy
import sys

import mxnet as mx
import numpy as np
import pytest
from mpi_jobs import ended, mpirun, needs_mpi, succeed

import gluonpar

pytestmark = needs_mpi
PROGRAM = pathlib.Path(__file__).parents[2] / "examples" / "several_processes.py"
# Batches of 40, 40 and 1 samples; in the last one rank 1 has none.
SMALL = ["--dataset=synthetic", "--limit=81", "--batch-size=40", "--epochs=2", "--device=cpu"]


def on_two_ranks(folder, *options):
    words = [sys.executable, str(PROGRAM), *SMALL, f"--save-dir={folder}", *options]
    return mpirun((2, words))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of two ranks without a break, and what the run printed."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, succeed(on_two_ranks(folder))[0]


def test_two_ranks_train_as_one_process_with_two_devices(whole, capsys):
    folder, printed = whole
    program = runpy.run_path(str(PROGRAM))
    with mx.name.NameManager():  # layers are counted from 0, as in a process of its own
        one = program["train"](program["parse"]([*SMALL, "--num-gpus=2"]))
        ranks = program["network"]()
    assert capsys.readouterr().out == printed.lstrip()  # mpirun may print a newline of its own
    ranks.initialize()
    gluonpar.load_checkpoint(folder / "epoch-2.ckpt", ranks)
    pairs = zip(one.collect_params().values(), ranks.collect_params().values())
    for want, got in pairs:
        for copy in want.list_data():  # float32 sums in another order, through six updates
            close = {"rtol": 0, "atol": 2e-5 * np.abs(copy.asnumpy()).max()}
            np.testing.assert_allclose(got.data().asnumpy(), copy.asnumpy(), **close)


def test_continuing_after_an_epoch_gives_the_bits_of_a_run_without_a_break(whole, tmp_path):
    folder, _ = whole
    (tmp_path / "epoch-1.ckpt").write_bytes((folder / "epoch-1.ckpt").read_bytes())
    out, _ = succeed(on_two_ranks(tmp_path, "--resume=1"))
    assert out.count("epoch 2, ") == 1 and "epoch 1, " not in out
    assert (tmp_path / "epoch-2.ckpt").read_bytes() == (folder / "epoch-2.ckpt").read_bytes()


def test_a_missing_checkpoint_ends_the_job_with_one_line(tmp_path):
    code, _, err = ended(on_two_ranks(tmp_path, "--resume=1"))
    assert code == 1 and "Traceback" not in err
    assert err.count(str(tmp_path / "epoch-1.ckpt")) == 1
