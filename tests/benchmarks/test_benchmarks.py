"""The benchmarks run, and their own checks of sums and losses find nothing wrong."""

import json
from pathlib import Path

import pytest

from benchmarks.training.candidates import CANDIDATES
from tests.support.mpi_jobs import needs_mpi
from tests.support.processes import end

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
FEW = ("--rounds", "1", "--steps", "1")


@pytest.fixture
def rows(tmp_path):
    """Return rows(module, *arguments), which runs a benchmark and returns its results."""

    def run(module, *arguments, codes=(0,)):
        command = ("-m", f"benchmarks.{module}", *FEW, *arguments)
        done = end(*command, "--json", tmp_path / "out.json", cwd=ROOT)
        assert done.returncode in codes, done.stdout + done.stderr
        return json.loads((tmp_path / "out.json").read_text())["rows"]

    return run


def test_training(rows):
    others = ("torch", "horovod", "tensorflow", "jax")  # they are installed apart
    names = [name for name in CANDIDATES if not name.startswith(others)]
    few = ("--device", "cpu", "--workload", "mlp", "--batch-size", "8", "--warmup", "1")
    measured = rows("training", *few, "--candidates", ",".join(names))
    assert [(row["workload"], row["name"]) for row in measured] == [("mlp", name) for name in names]
    for row in measured:
        assert row["last_loss"] < row["first_loss"] and row["peak_bytes"] > 1e7
        ours = CANDIDATES[row["name"]].runtime == "gluonpar"
        assert row["imports_gluonpar"] == ours


def test_training_with_settings_that_take_turns(rows):
    few = ("--device", "cpu", "--workload", "lenet", "--batch-size", "8", "--warmup", "1")
    few += ("--interleave", "--num-gpus", "1,2", "--candidates", "gluonpar,one context")
    measured = [(row["num_devices"], row["name"]) for row in rows("training", *few)]
    assert measured == [(k, name) for k in (1, 2) for name in ("gluonpar", "one context")]


@needs_mpi
def test_cluster(rows):
    few = ("--processes", "2", "--batch-size", "4", "--sizes", "64,65536")
    measured = {row["name"]: row for row in rows("cluster", *few)}
    assert {"gluonpar", "gluonpar over tcp", "dist_sync", "no exchange"} <= set(measured)
    assert list(measured["gluonpar"]["seconds"]) == ["64", "65536", "steps"]


def test_more_cores(rows):
    few = ("--workload", "mlp", "--num-gpus", "1", "--warmup", "1")
    (row,) = rows("training.more_cores", *few, codes=(0, 1))  # 1: other programs ran beside it
    assert 0 < row["python"] and row["alone"] == row["at_most"]


def test_passes(rows):
    few = ("--params", "3", "--num-gpus", "2", "--networks", "1,2", "--warmup", "1")
    measured = rows("training.passes", *few)
    assert [(row["networks"], row["passes"]) for row in measured] == [
        (networks, passes) for networks in (1, 2) for passes in ("one", "per device")
    ]
    assert all(
        seconds > 0 for row in measured for pair in row["seconds"].values() for seconds in pair
    )


def test_growth(rows):
    measured = rows("growth", "--doors", "new networks static,hybridize again")
    assert len(measured) == 4
    assert all(len(figures) == 3 for row in measured for figures in row["parts"])


def test_lenet_kernels(rows):
    measured = rows("training.lenet_kernels", "--warmup", "0")
    names = ["the book's", "1, 24, 56", "3, 24, 56", "1, 32, 64", "3, 32, 64"]
    assert [row["name"] for row in measured] == names


def test_data_loader():
    few = ("--samples", "64", "--batch-size", "16", "--rounds", "1")
    done = end("-m", "benchmarks.data_loader", *few, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if "difference" in line]) == 6
