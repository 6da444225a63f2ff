"""Scripts that docs/programs.md changes train as before, on two contexts and on two ranks."""

import pathlib
import sys

import numpy as np
import ports
import pytest

from tests.support import processes
from tests.support.mpi_jobs import mpirun, needs_mpi, succeed

PROGRAM = pathlib.Path(ports.__file__)
# Those whose batches are of the same samples on any number of ranks and devices, and which have no
# batch normalisation, which takes the statistics of each device.
ANYWHERE_ALIKE = ["d2l_multi_gpu"]


def trained(name, which, folder, k):
    done = processes.end(PROGRAM, name, which, folder, k, cwd=folder)
    assert done.returncode == 0, done.stderr
    return parameters(folder / f"{which}-{k}-1-0")


def parameters(folder):
    with np.load(folder / "params.npz") as file:
        return [file[name] for name in file.files]


def assert_close(some, others):
    """Tolerance: rounding of float32 through a few updates."""
    for got, want in zip(some, others):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_the_page_has_each_script_and_counts_its_changes():
    assert sorted(ports.changes()) == ports.NAMES
    for name, (count, block) in ports.changes().items():
        assert ports.num_changed(block) == count, name


@pytest.mark.parametrize("name", ports.NAMES)
def test_a_changed_script_trains_on_two_contexts_as_before(name, tmp_path):
    """Horovod has one context in each process, of which there is one here."""
    before = 1 if name == "horovod_mnist" else 2
    assert_close(trained(name, "after", tmp_path, 2), trained(name, "before", tmp_path, before))


@needs_mpi
@pytest.mark.parametrize("name", ports.NAMES)
def test_a_changed_script_trains_two_ranks_alike(name, tmp_path):
    succeed(mpirun((2, [sys.executable, str(PROGRAM), name, "after", str(tmp_path), "2"])))
    first, second = (parameters(tmp_path / f"after-2-2-{rank}") for rank in range(2))
    assert all(a.tobytes() == b.tobytes() and np.isfinite(a).all() for a, b in zip(first, second))
    if name in ANYWHERE_ALIKE:
        assert_close(first, trained(name, "after", tmp_path, 1))
