"""examples/six_steps.py, whose steps docs/cluster.md explains, trains in two ranks as in one."""

import pathlib
import re
import runpy
import sys

import mxnet as mx
import numpy as np
import pytest
from mpi_jobs import mpirun, needs_mpi, succeed

import gluonpar

PROGRAM = pathlib.Path(__file__).parents[2] / "examples" / "six_steps.py"
# Batches of 40, 40 and 1 samples; in the last one rank 1 has none.
SMALL = ["--dataset=synthetic", "--limit=81", "--batch-size=40", "--epochs=2"]


def test_the_page_quotes_every_step():
    page = (PROGRAM.parents[1] / "docs" / "cluster.md").read_text("utf-8")
    steps = re.findall(r"^ *(.*# [1-6]\. .*)$", PROGRAM.read_text("utf-8"), re.M)
    assert len(steps) == 6 and all(step in page for step in steps)


@needs_mpi
@pytest.mark.skipif(mx.context.num_gpus() > 0, reason="it is compared on CPUs")
def test_two_ranks_print_and_train_what_one_process_does(tmp_path, capsys):
    saved = str(tmp_path / "two.ckpt")
    printed, _ = succeed(mpirun((2, [sys.executable, str(PROGRAM), *SMALL, f"--save={saved}"])))
    program = runpy.run_path(str(PROGRAM))
    with mx.name.NameManager():  # layers are counted from 0, as in a process of its own
        one = program["train"](program["parse"](SMALL))
        two = program["train"](program["parse"]([*SMALL, "--epochs=0"]))
    assert capsys.readouterr().out == printed.lstrip()  # mpirun may print a newline of its own
    gluonpar.load_checkpoint(saved, two)
    for want, got in zip(one.collect_params().values(), two.collect_params().values()):
        close = {"rtol": 0, "atol": 2e-5 * np.abs(want.data().asnumpy()).max()}
        np.testing.assert_allclose(got.data().asnumpy(), want.data().asnumpy(), **close)
