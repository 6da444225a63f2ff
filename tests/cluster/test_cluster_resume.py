"""Checkpoints of several processes, under a real mpirun: written by one, read on any number."""

import os
import pathlib
import re
import signal
import sys

import mxnet as mx
import numpy as np
import psutil
import pytest

from tests.support.mpi_jobs import ended, lines_of_ours, mpirun, needs_mpi, succeed
from tests.support.processes import runs, wait_until

pytestmark = needs_mpi
SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "train_lenet.py"
NARROW = (
    "import sys; from gluonpar.training import command_line, workloads\n"
    "workloads.ResNet18Workload.width = 2\n"
    "sys.exit(command_line.main(['--model', 'resnet18', *sys.argv[1:]]))\n"
)
COMMANDS = {"lenet": [sys.executable, str(SCRIPT)], "resnet18": [sys.executable, "-c", NARROW]}
EPOCHS, LIMIT, BATCH_SIZE = 2, 44, 8  # six batches an epoch, the last of four samples
MIDDLE = "epoch-0001-batch-000003.npz"


def command(model, num_devices, *more):
    numbers = {"--num-gpus": num_devices, "--limit": LIMIT, "--batch-size": BATCH_SIZE}
    words = [str(word) for pair in numbers.items() for word in pair]
    return [*COMMANDS[model], "--device", "cpu", "--dataset", "synthetic", *words, *map(str, more)]


def train(model, ranks, num_devices, *more):
    out, err = succeed(mpirun((ranks, command(model, num_devices, *more))))
    assert "test acc: " in out, err
    return out


@pytest.fixture(scope="module", params=[pytest.param("lenet", marks=pytest.mark.slow), "resnet18"])
def whole(request, tmp_path_factory):
    """Model, and the folder of a run of two processes that was never stopped."""
    folder = tmp_path_factory.mktemp(request.param)
    saving = ("--save-dir", folder, "--save-every", 3, "--keep", 99)
    train(request.param, 2, 1, "--epochs", EPOCHS, *saving)
    return request.param, folder


def last(folder, model):
    return folder / f"{model}-epoch-{EPOCHS:04d}.params"


def resumed(whole, ranks, num_devices, folder):
    """The last parameters of a run that goes on from the middle of the first epoch."""
    model, of_whole = whole
    options = ("--epochs", EPOCHS, "--save-dir", folder, "--resume", of_whole / f"{model}-{MIDDLE}")
    out = train(model, ranks, num_devices, *options)
    assert "epoch 1, 3 of 6 batches done" in out
    return last(folder, model)


def assert_equal_to_rounding(one, other):
    """float32 sums in another order, through nine steps; relative to a parameter's largest."""
    one, other = mx.nd.load(str(one)), mx.nd.load(str(other))
    assert set(one) == set(other)
    for name, array in one.items():
        want = other[name].asnumpy()
        assert abs(array.asnumpy() - want).max() <= 1e-4 * abs(want).max(), name


def test_checkpoints_are_there_once_and_made_of_all_ranks(whole):
    model, folder = whole
    places = ("0001-batch-000003", "0001", "0002-batch-000003", "0002")
    names = [f"{model}-epoch-{place}.npz" for place in places]
    names += [f"{model}-epoch-000{epoch}.params" for epoch in (1, 2)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    with np.load(folder / f"{model}-{MIDDLE}", allow_pickle=False) as found:
        assert len(found.files) > 8


def test_on_as_many_ranks_resuming_gives_the_same_bits(whole, tmp_path):
    model, folder = whole
    assert resumed(whole, 2, 1, tmp_path).read_bytes() == last(folder, model).read_bytes()
    final = f"{model}-epoch-0002.npz"
    with np.load(tmp_path / final) as one, np.load(folder / final) as other:
        arrays = [name for name in one.files if name != "header"]  # which has seconds in it
        assert arrays and set(one.files) == set(other.files)
        assert all(one[name].tobytes() == other[name].tobytes() for name in arrays)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "num_devices"), [(1, 2), (2, 2), (1, 1), (3, 1)])
def test_on_other_ranks_and_devices_resuming_is_equal_to_rounding(
    whole, ranks, num_devices, tmp_path
):
    model, folder = whole
    if model == "resnet18" and ranks * num_devices != 2:
        pytest.skip("batch normalisation sees each device's shard, so other shards train otherwise")
    assert_equal_to_rounding(resumed(whole, ranks, num_devices, tmp_path), last(folder, model))


@pytest.mark.slow
def test_what_one_process_wrote_several_go_on_from(whole, tmp_path):
    model, folder = whole
    if model == "resnet18":
        pytest.skip("LeNet shows it; the tests above have ResNet's statistics on other ranks")
    train(model, 1, 2, "--epochs", 1, "--save-dir", tmp_path)
    train(model, 2, 1, "--epochs", EPOCHS, "--save-dir", tmp_path, "--resume")
    assert_equal_to_rounding(last(tmp_path, model), last(folder, model))


def processes_of(job):
    """The ranks' process ids, by rank."""
    ranks = psutil.Process(job.pid).children()
    return {int(rank.environ()["OMPI_COMM_WORLD_RANK"]): rank.pid for rank in ranks}


def signalled(folder, whom, number):
    """Send a run of two ranks a signal after eight batches; return its end and the ranks' pids."""
    more = ("--epochs", 1000, "--save-dir", folder, "--save-every", 3, "--log-interval", 1)
    job = mpirun((2, command("lenet", 1, *more)))
    for line in job.stdout:
        if line.startswith("epoch 2, batch 2/6"):
            break
    ranks = processes_of(job)
    assert set(ranks) == {0, 1}, job.stderr.read()
    os.kill(job.pid if whom == "mpirun" else ranks[whom], number)
    return (*ended(job), ranks.values())


def assert_goes_on_bit_for_bit(folder, tmp_path):
    """Resume; the parameters are those of a run of as many epochs that was never stopped."""
    newest = sorted(folder.glob("lenet-*.npz"))[-1]
    number = int(re.search(r"epoch-(\d+)", newest.name)[1])
    epochs = number if "batch" in newest.name else number + 1
    train("lenet", 2, 1, "--epochs", epochs, "--save-dir", folder, "--resume")
    train("lenet", 2, 1, "--epochs", epochs, "--save-dir", tmp_path / "never stopped")
    name = f"lenet-epoch-{epochs:04d}.params"
    assert (folder / name).read_bytes() == (tmp_path / "never stopped" / name).read_bytes()
    assert not list(folder.glob(".*"))  # nothing half written is left


@pytest.mark.parametrize(
    ("whom", "number"),
    [
        (0, signal.SIGTERM),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("mpirun", signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_rank_saves_and_ends_all_with_143(whom, number, tmp_path):
    folder = tmp_path / "ended"
    code, out, err, ranks = signalled(folder, whom, number)
    assert code == 143, err
    newest = sorted(folder.glob("lenet-*.npz"))[-1]
    assert lines_of_ours(err) == [
        f"train_lenet.py: ended by SIGTERM; --resume continues from {newest}"
    ]
    wait_until(lambda: not any(map(runs, ranks)))
    if whom == 1:
        assert_goes_on_bit_for_bit(folder, tmp_path)


@pytest.mark.slow
def test_sigterm_to_mpirun_ends_non_zero_and_what_it_leaves_can_be_gone_on_from(tmp_path):
    """It gives its ranks a quarter of a second, which may be enough for one more checkpoint."""
    folder = tmp_path / "ended"
    code, out, err, ranks = signalled(folder, "mpirun", signal.SIGTERM)
    assert code != 0, err
    assert_goes_on_bit_for_bit(folder, tmp_path)
