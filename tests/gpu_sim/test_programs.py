"""Whole programs on simulated GPUs: what they compute, and what they say of GPUs that fail."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import NamedTuple

import mxnet as mx
import numpy as np
import pytest
from cuda_sim import environment

from tests.support.mpi_jobs import mpirun, needs_mpi, rank_command
from tests.support.mpi_jobs import succeed as end_of
from tests.support.processes import end
from tests.support.ranks import training

REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS = ("MXNET_", "OMP_", "GLUONPAR_", "NVIDIA_", "CUDA_SIM_")  # importing gluonpar sets some
LENET = "scripts/train_lenet.py"
DATA = ("--dataset", "synthetic", "--seed", "1")
SHORT = (*DATA, "--limit", "96", "--batch-size", "48")
GPUS, CPUS = ("--num-gpus", "2", "--device", "gpu"), ("--num-gpus", "2", "--device", "cpu")
PYPI = {"GLUONPAR_CUDA": "pypi"}  # the libraries of which gluonpar knows NVRTC's version


def run(*arguments, num_devices=2, more=None, **options):
    """Run Python on simulated GPUs; return the ended process."""
    unset = {name: None for name in os.environ if name.startswith(SETTINGS)}
    variables = {**unset, **environment(num_devices, **options), **(more or {})}
    return end(*arguments, cwd=REPOSITORY, seconds=900, **variables)


def succeed(*arguments, **options):
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


class Trained(NamedTuple):
    """What a run printed, and the parameters after each epoch."""

    out: str
    err: str
    epochs: list[list[np.ndarray]]

    def bits(self):
        return [param.tobytes() for params in self.epochs for param in params]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """train(*arguments, **options): train LeNet by its script."""

    def train(*arguments, folder=None, **options):
        folder = folder or tmp_path_factory.mktemp("run")
        done = succeed(LENET, *arguments, "--save-dir", folder, **options)
        files = [mx.nd.load(str(file)) for file in sorted(folder.glob("*.params"))]
        params = [[f[name].asnumpy() for name in sorted(f)] for f in files]
        return Trained(done.stdout, done.stderr, params)

    return train


@pytest.fixture(scope="module")
def short(train):
    """short(devices): two epochs of two batches."""
    return functools.lru_cache(None)(lambda devices: train(*SHORT, "--epochs", "2", *devices))


def difference(one, other, epoch=-1):
    """The largest difference of parameters after an epoch, relative to their array's largest."""
    assert len(one.epochs) == len(other.epochs) > 0
    pairs = zip(one.epochs[epoch], other.epochs[epoch])
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


# What is computed


def test_a_short_run_ends_where_cpu_contexts_end(short):
    assert difference(short(GPUS), short(CPUS)) < 1e-4
    assert len(short(GPUS).epochs) == 2


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (GPUS, {"delays": 1}),
        (GPUS, {"delays": 2}),
        (GPUS, {"peers": "none"}),
        (("--gpus", "0,2"), {"num_devices": 3}),
    ],
    ids=["delays 1", "delays 2", "no peers", "gpus 0 and 2"],
)
def test_neither_delays_nor_links_nor_ids_change_a_bit(devices, options, train, short):
    other = train(*SHORT, "--epochs", "2", *devices, **options)
    assert other.bits() == short(GPUS).bits()
    assert ("gpu(2)" in other.out) == ("0,2" in devices)
    assert ("no peer access" in other.out) == ("peers" in options)


def test_deterministic_takes_cudnns_deterministic_gradients(train, short):
    """Whatever the environment says; without the option, the gradients' sums have any order."""
    arguments = (*SHORT, "--epochs", "2", *GPUS)
    other = {"MXNET_CUDNN_AUTOTUNE_DEFAULT": "1", "MXNET_ENFORCE_DETERMINISM": "0"}
    repeatable = train(*arguments, "--deterministic", atomics=1, more=other)
    timed = "Running performance tests"  # MXNet's line: times differ each time, too
    assert repeatable.bits() == short(GPUS).bits() and timed not in repeatable.err
    usual = train(*arguments, atomics=1)
    assert usual.bits() != short(GPUS).bits() and timed in usual.err


@pytest.mark.parametrize("first, second", [(GPUS, CPUS), (CPUS, GPUS)])
def test_gpus_and_cpus_continue_each_others_checkpoints(first, second, train, short, tmp_path):
    train(*SHORT, "--epochs", "1", *first, folder=tmp_path)
    resumed = train(*SHORT, "--epochs", "2", *second, "--resume", folder=tmp_path)
    assert "\nresumed: " in resumed.out
    assert difference(resumed, short(CPUS)) < 1e-4


RESNET = """
import sys
from gluonpar.training import command_line, workloads
from gluonpar.training.data import dataset

small = dataset.synthetic(num_train=8, num_test=8)
dataset.synthetic = lambda: small
workloads.ResNet18Workload.width = 8
sys.exit(command_line.main(["--model", "resnet18", *sys.argv[1:]]))
"""


def test_a_narrow_resnet18_ends_where_cpu_contexts_end(tmp_path):
    """After one step: from the second on, the last layers' batch normalisation of four samples a
    device multiplies rounding, which differs between processors, by thousands."""
    params = []
    for devices in (GPUS, CPUS):
        folder = tmp_path / devices[-1]
        arguments = (*DATA, "--batch-size", "8", "--epochs", "1", "--save-dir", folder)
        succeed("-c", RESNET, *arguments, *devices)
        (file,) = folder.glob("*.params")
        params.append({name: array.asnumpy() for name, array in mx.nd.load(str(file)).items()})
    gpus, cpus = params
    assert set(gpus) == set(cpus)
    for name, want in cpus.items():
        scale = max(np.abs(want).max(), 1e-2)  # biases before a batch normalization are rounding
        # cuDNN divides the variance that it keeps by n - 1, and MXNet on CPUs by n.
        tolerance = 1e-2 if "running_var" in name else 1e-3
        assert np.abs(gpus[name] - want).max() < tolerance * scale, name


# Several processes


@needs_mpi
def test_two_ranks_with_two_gpus_each_train_as_four(tmp_path):
    job = rank_command("training", "on_gpus", tmp_path)
    end_of(mpirun((2, job), **environment(2)))
    got = np.load(tmp_path / "2.npz")
    want_of = training.trained(4)  # on CPU contexts
    for name, arrays in want_of.items():
        for i, want in enumerate(arrays):
            # as in test_cluster.py, and other kernels; batch normalisation of few samples divides
            # by small numbers, so that it rounds more there, too; biases before it are rounding
            least = 1e-2 if name in ("by_sync_batch_norm", "bits") else 0
            scale, limit = max(np.abs(want).max(), least), 1e-4 if name == "by_towers" else 2e-5
            assert np.abs(got[f"{name}{i}"] - want).max() <= limit * scale, (name, i)


# selftest, verify and doctor


def test_the_self_test_finds_all_gpus_right_though_cudnn_and_cublas_would_round():
    """Also with gradients in any order and with TF32, which differ by more than rounding."""
    done = run("-m", "gluonpar", "selftest", "--num-gpus", 4, num_devices=4, atomics=1, tf32=1)
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout
    assert "gpu(3)" in done.stdout.splitlines()[0]


OWN_NETWORK = """
import gluonpar, mxnet as mx, numpy as np
from mxnet import gluon

ctx = [mx.gpu(0), mx.gpu(1)]
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Conv2D(20, 3), gluon.nn.Dense(3))
net.initialize(ctx=ctx)
batch = np.random.RandomState(0).normal(size=(20, 1, 9, 9)).astype("float32"), np.arange(20) % 3
loss = gluon.loss.SoftmaxCELoss()
if COMPUTED_BEFORE:
    for _ in range(2):
        with mx.autograd.record():
            losses = [loss(net(X), y) for X, y in gluonpar.split_and_load(batch, ctx)]
        mx.autograd.backward(losses)
print(gluonpar.verify(net, loss, batch, ctx))
"""


@pytest.mark.parametrize("computed_before", [False, True])
def test_verify_of_ones_own_network_repeats_unless_it_was_computed_before(computed_before):
    done = run("-c", f"COMPUTED_BEFORE = {computed_before}\n{OWN_NETWORK}", atomics=1)
    if computed_before:
        assert "VerificationError: repeatability: " in done.stderr
        assert "call it first" in done.stderr
    else:
        assert "the same bits twice" in done.stdout, done.stderr


def test_the_doctor_finds_nothing_wrong_with_usable_gpus():
    done = succeed("-m", "gluonpar", "doctor", "--json", more=PYPI)
    assert json.loads(done.stdout)["wrong"] == 0


# GPUs and drivers that cannot do all


STEP = (LENET, *SHORT, "--dry-run", *GPUS)
OLD = {"driver": "450.80.02", "nvrtc": "11.8"}


def test_a_driver_older_than_nvrtc_trains_without_fused_operators():
    succeed(*STEP, more=PYPI, **OLD)


def last_line(done):
    return done.stderr.splitlines()[-1]


# The exit code of a step, and words of its last line. The doctor's are in test_doctor.py.
UNUSABLE = {
    "a GPU without kernels": ({"capability": "9.0"}, 2, ["capability 9.0", "5.0 to 8.9"]),
    "fused operators on an old driver": (
        *({"more": {**PYPI, "MXNET_USE_FUSION": "1"}, **OLD}, 1, ["a GPU failed", "CUDA Driver: "]),
    ),
    "the first drivers of CUDA 11": ({"driver": "450.51.06"}, 2, ["gluonpar doctor"]),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_what_cannot_be_used_is_named(what):
    options, code, words = UNUSABLE[what]
    done = run(*STEP, **options)
    assert done.returncode == code and all(word in last_line(done) for word in words), done.stderr
    assert code != 2 or (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_a_gpu_that_is_too_small_is_one_line_and_exit_code_3():
    done = run(*STEP, "--deterministic", bytes=4_000_000)  # without MXNet's line about its timing
    assert done.returncode == 3 and done.stderr.count("\n") == 1, done.stderr
    assert "out of memory" in last_line(done) and "--batch-size" in last_line(done)


@pytest.mark.parametrize("launches", [20, 100])
def test_a_gpu_that_fails_ends_the_run_with_what_happened(launches):
    done = run(LENET, *SHORT, *GPUS, fail_after=f"1:{launches}")
    assert done.returncode == 1
    assert "a GPU failed: " in last_line(done) and "illegal memory access" in last_line(done)
