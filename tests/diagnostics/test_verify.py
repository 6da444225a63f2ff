"""gluonpar.verify and python -m gluonpar verify: what is right passes, what is wrong is found."""

import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluonpar
from gluonpar import SyncBatchNorm, collectives
from gluonpar.__main__ import main
from gluonpar.collectives.plan import Hop
from gluonpar.diagnostics import self_test
from gluonpar.diagnostics.verification import Wrong, near, verify
from gluonpar.models import resnet

CPUS = [mx.cpu(i) for i in range(3)]
X = np.random.RandomState(0).normal(size=(10, 1, 8, 8)).astype("float32")
BATCH = X, (np.arange(10) % 3).astype("float32")
LOSS = gluon.loss.SoftmaxCELoss()


def made(*blocks, ctx=CPUS, hybridized=False):
    net = resnet.chain(*blocks)
    net.initialize(mx.init.Xavier(), ctx=ctx)
    if hybridized:
        net.hybridize(static_alloc=True, static_shape=True)
    return net


def held(net):
    return [a.asnumpy().tobytes() for p in net.collect_params().values() for a in p.list_data()]


def test_the_command_proves_two_devices_and_prints_the_difference_of_every_parameter():
    done = subprocess.run(
        [sys.executable, "-m", "gluonpar", "verify", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "devices: cpu(0), cpu(1)"
    assert lines[-1] == "all is right on these devices"
    for name in collectives.ALGORITHMS:
        assert any(line.startswith(f"ok     all-reduce {name}: ") for line in lines)
    differences = [line for line in lines if "max relative difference" in line]
    assert len(differences) == 8 + 6  # LeNet's parameters, and the Gluon network's


def test_a_request_that_cannot_be_met_is_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "gluonpar", "verify", "--num-gpus", "0"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("python -m gluonpar verify: error: --num-gpus 0 devices")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("k", [1, 4])
def test_any_number_of_devices(k):
    assert self_test.prove([mx.cpu(i) for i in range(k)], lambda line: None) == []


def findings(capsys):
    """What the command prints as wrong; it must exit 1, and show no traceback."""
    assert main(["verify", "--num-gpus", "3", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return [line[7:] for line in captured.out.splitlines() if line.startswith("WRONG")]


@pytest.fixture
def only(monkeypatch):
    """Checks whose names begin so, for the time's sake."""
    every = self_test._checks

    def choose(start):
        kept = lambda ctx: ((n, check) for n, check in every(ctx) if n.startswith(start))  # noqa: E731
        monkeypatch.setattr(self_test, "_checks", kept)

    return choose


@pytest.fixture
def planted():
    """Registers a plan for the test as the algorithm "planted"."""
    yield collectives.register("planted")
    collectives.ALGORITHMS.pop("planted", None)


def test_an_algorithm_that_leaves_out_a_device_is_found(planted, only, capsys):
    def leaves_out_the_last(k):
        there = [Hop(i, i + 1, 0, 0, reduce=True) for i in range(k - 2)]
        return there + [Hop(k + i, 0, i + 1, 0, reduce=False) for i in range(k - 1)]

    planted(leaves_out_the_last)
    only("all-reduce planted")
    (found,) = findings(capsys)
    assert found.startswith("all-reduce planted: sum of float16 arrays of shape (1,) on cpu(0): ")
    assert "1 of 1 values are wrong; at 0 it is 19.0, not 54.0" in found


def test_an_algorithm_that_does_not_tell_a_device_the_sum_is_found(planted, only, capsys):
    def forgets_the_last(k):
        there = [Hop(i, i + 1, 0, 0, reduce=True) for i in range(k - 1)]
        return there + [Hop(k + i, 0, i + 1, 0, reduce=False) for i in range(k - 2)]

    planted(forgets_the_last)
    only("all-reduce planted")
    (found,) = findings(capsys)
    assert "on cpu(2): 1 of 1 values are wrong" in found


def test_an_error_in_a_check_is_a_finding_and_the_others_are_done(monkeypatch, only, capsys):
    def broken(lists, op, accumulate):
        raise mx.MXNetError("CUDA: no kernel image is available\nStack trace: many lines")

    monkeypatch.setitem(
        collectives.ALGORITHMS, "ring", collectives.registry.Algorithm("ring", run=broken)
    )
    only("all-reduce r")
    assert findings(capsys) == ["all-reduce ring: MXNetError: CUDA: no kernel image is available"]


def test_a_copy_that_arrives_changed_is_found(monkeypatch, only, capsys):
    copyto = mx.nd.NDArray.copyto

    def rubbish(self, other):
        done = copyto(self, other)
        if isinstance(other, mx.nd.NDArray) and other.context == mx.cpu(2) and other.size == 1009:
            other[1000:] = 0
        return done

    monkeypatch.setattr(mx.nd.NDArray, "copyto", rubbish)
    only("copies")
    (found,) = findings(capsys)
    assert "array of shape (1009,) copied from cpu(0) to cpu(2): 9 of 1009 values" in found


def broken_update(kind):
    """train_batch with a planted bug."""
    right = gluonpar.train_batch

    def wrong(X, y, device_params, ctx, lr):
        if kind == "one device only":
            before = device_params[1][2].copy()
        losses = right(X, y, device_params, ctx, lr * 1.05 if kind == "rate" else lr)
        if kind == "one device only":
            before.copyto(device_params[1][2])
        if kind == "noise":
            noise = float(np.random.uniform(1e-6, 2e-6))
            for params in device_params:
                params[3] += noise
        return losses

    return wrong


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("rate", "updates: parameter 0 differs by"),
        ("one device only", "replicas: parameter 2 differs between cpu(0) and cpu(1)"),
        ("noise", "was different when trained again from the same start"),
    ],
)
def test_a_broken_update_is_found(kind, words, monkeypatch, only, capsys):
    monkeypatch.setattr(self_test, "train_batch", broken_update(kind))
    only("LeNet")
    (found,) = findings(capsys)
    assert found.startswith("LeNet by train_batch: ") and words in found


def test_a_trainer_that_divides_by_the_wrong_number_is_found(monkeypatch, only, capsys):
    step = gluonpar.Trainer.step
    monkeypatch.setattr(self_test.Trainer, "step", lambda self, n: step(self, n // 3))
    only("a Gluon network")
    (found,) = findings(capsys)
    assert "updates: parameter 0 differs by" in found


NETWORKS = {
    "plain": (lambda: (nn.Conv2D(4, 3, activation="relu"), nn.Dense(3)), ""),
    "batch norm": (lambda: (nn.Conv2D(4, 3), nn.BatchNorm(), nn.Dense(3)), "BatchNorm: each"),
    "dropout": (lambda: (nn.Dense(9), nn.Dropout(0.5), nn.Dense(3)), "random numbers: "),
    "sync": (lambda: (nn.Conv2D(4, 3), SyncBatchNorm(), nn.Dense(3)), "SyncBatchNorm: devices"),
    "both norms": (
        lambda: (SyncBatchNorm(), nn.Conv2D(4, 3), nn.BatchNorm(), nn.Dense(3)),
        "SyncBatchNorm: devices",
    ),
}


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("kind", NETWORKS)
def test_ones_own_network_is_right_and_stays_as_it_was(kind, hybridized):
    blocks, said = NETWORKS[kind]
    net = made(*blocks(), hybridized=hybridized)
    verify(net, LOSS, BATCH, CPUS)
    before = held(net)
    lines = verify(net, LOSS, BATCH, CPUS)
    assert held(net) == before
    assert len(lines) == (5 if said else 4)
    assert lines[1].startswith(said or "repeatability: the same bits twice")
    assert "gradients, 3 devices against one: largest relative difference" in lines[-1]


def test_fewer_samples_than_devices():
    assert verify(made(nn.Dense(3)), LOSS, (X[:2], BATCH[1][:2]), CPUS)


class ByDevice(gluon.Block):
    """A network with a planted bug, which only some devices have."""

    def __init__(self, change):
        super().__init__()
        self.inner, self.change, self.calls = nn.Dense(3, in_units=64), change, 0
        self.initialize(ctx=CPUS)

    def forward(self, x):
        self.calls += 1
        return self.change(self.inner(x), x.context.device_id, self.calls)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda out, device, _: out * 1.01 if device == 2 else out, "losses: losses differs by"),
        (lambda out, device, _: mx.nd.BlockGrad(out) * 0 + out.detach() + 0 * out
         if device == 1 else out, "gradients, 3 devices against one: .*weight differs by"),
        (lambda out, device, calls: out * (1 + 1e-5 * calls), "repeatability: the whole batch on "),
        (lambda out, device, calls: out * (1 + 1e-5 * calls) if device else out,
         "repeatability: a pass on 3 devices, done twice, gave different losses"),
    ],
)  # fmt: skip
def test_a_network_that_differs_by_device_or_from_time_to_time_is_found(change, words):
    with pytest.raises(Wrong, match=words):
        verify(ByDevice(change), LOSS, BATCH, CPUS)


def test_replicas_that_differ_are_found():
    net = made(nn.Dense(3, in_units=64))
    net[0].bias.list_data()[1][2] = 5
    with pytest.raises(Wrong, match=r"bias differs between cpu\(0\) and cpu\(1\), by up to 5"):
        verify(net, LOSS, BATCH, CPUS)


def test_what_cannot_be_verified_is_an_error_with_the_remedy():
    net = made(nn.Dense(3), ctx=CPUS[:2])
    with pytest.raises(ValueError, match=r"is not on cpu\(2\); initialize the network on all"):
        verify(net, LOSS, BATCH, CPUS)
    mean = lambda scores, y: LOSS(scores, y).mean()  # noqa: E731
    with pytest.raises(ValueError, match=r"shape \(1,\) for 10 samples; it must give one loss"):
        verify(made(nn.Dense(3)), mean, BATCH, CPUS)
    net = made(nn.Dense(3))
    net.collect_params().setattr("grad_req", "add")
    with pytest.raises(ValueError, match="grad_req='add'.; verify needs 'write'"):
        verify(net, LOSS, BATCH, CPUS)
    with pytest.raises(ValueError, match="use gluonpar.SyncBatchNorm"):
        verify(made(gluon.contrib.nn.SyncBatchNorm(num_devices=3), nn.Dense(3)), LOSS, BATCH, CPUS)


def test_training_goes_on_after_a_verification_with_sync_batch_norm():
    net = made(nn.Conv2D(4, 3), SyncBatchNorm(timeout_seconds=20), nn.Dense(3))
    verify(net, LOSS, BATCH, CPUS)
    trainer = gluonpar.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    before = held(net)
    with autograd.record():
        shards = gluonpar.split_and_load(BATCH, CPUS)
        losses = [LOSS(net(X_shard), y_shard) for X_shard, y_shard in shards]
    autograd.backward(losses)
    trainer.step(10)
    trainer.check_replicas()
    assert held(net) != before


def test_what_is_not_a_number_is_never_near():
    with pytest.raises(Wrong, match="differs by nan"):
        near({"a": np.ones(2, "float32")}, {"a": np.array([1, np.nan], "float32")}, "what")


def test_noise_in_what_is_all_but_zero_is_let_off():
    want = {"big": np.full(3, 100, "float32"), "none": np.zeros(3, "float32")}
    assert near(want, {**want, "none": np.full(3, 1e-5, "float32")}, "what")
    with pytest.raises(Wrong, match="none differs"):
        near(want, {**want, "none": np.full(3, 1e-2, "float32")}, "what")
