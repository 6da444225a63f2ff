"""gluonpar.verify and gluonpar selftest: correct networks pass, planted bugs are found."""

import itertools

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import gluonpar
from gluonpar import SyncBatchNorm, Wrong, collectives, verify
from gluonpar.__main__ import main
from gluonpar.diagnostics import self_test
from gluonpar.diagnostics.verification import check_close
from gluonpar.models import resnet

CPUS = [mx.cpu(i) for i in range(3)]
X = np.random.RandomState(0).normal(size=(10, 1, 8, 8)).astype("float32")
BATCH = X, (np.arange(10) % 3).astype("float32")
LOSS = gluon.loss.SoftmaxCELoss()


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_command_finds_nothing_wrong_and_says_what_one_device_cannot_show(k, capsys):
    assert main(["selftest", "--device", "cpu", "--num-gpus", str(k)]) == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first.startswith("devices: cpu(0)") and last == "all checks are right"
    names = [line[7:].partition(":")[0] for line in lines if line.startswith("ok     ")]
    sums = [f"all-reduce {name}" for name in collectives.usable(CPUS)]
    between = [*sums, "all-reduce as chosen for training"] if k > 1 else []
    on_one = ["LeNet by verify", "training by train_batch", "training by Trainer"]
    assert names == [*between, *on_one]
    assert any("are not checked" in line for line in lines) == (k == 1)


@pytest.fixture
def failures(monkeypatch, capsys):
    """failures(start): run the command's checks whose names begin so; the lines that are wrong."""
    every = self_test._checks

    def run(start):
        chosen = [each for each in every(CPUS) if each[0].startswith(start)]
        monkeypatch.setattr(self_test, "_checks", lambda _: chosen)
        assert main(["selftest", "--num-gpus", "3", "--device", "cpu"]) == 1
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return [line[7:] for line in captured.out.splitlines() if line.startswith("WRONG")]

    return run


def sums(lists, op):
    collectives.EXECUTORS["host"].allreduce(lists, op)


def last_left_out(lists, op):
    sums([data[:-1] for data in lists], op)


def last_without_the_sum(lists, op):
    sums(lists, op)
    for data in lists:
        data[-1][:] = 0


def failing(lists, op):
    raise mx.MXNetError("Traceback (most recent call last):\n  many lines\nCUDA: no kernel")


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (last_left_out, "float16 arrays of 1: 3 of 3 sums are wrong"),
        (last_without_the_sum, "float16 arrays of 1: 1 of 3"),
        (failing, "all-reduce ring: MXNetError: CUDA: no kernel"),
    ],
)
def test_a_wrong_algorithm_is_found(algorithm, words, monkeypatch, failures):
    monkeypatch.delitem(collectives.ALGORITHMS, "ring")
    collectives.register_executor("ring")(algorithm)
    (found,) = failures("all-reduce r")
    assert words in found


@pytest.mark.parametrize(("src", "dst"), [*itertools.permutations(range(3), 2)])
def test_a_copy_between_any_two_devices_that_arrives_changed_is_found(
    src, dst, monkeypatch, failures
):
    """In the sums of an algorithm in which every device sends to every other."""
    copyto = mx.nd.NDArray.copyto

    def corrupt(self, other):
        done = copyto(self, other)
        if (self.context, getattr(other, "context", other)) == (mx.cpu(src), mx.cpu(dst)):
            done[-1:] += 1
        return done

    monkeypatch.setattr(mx.nd.NDArray, "copyto", corrupt)
    (found,) = failures("all-reduce balanced")
    assert "sums are wrong" in found


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("rate", "updates: parameter 0 differs by"),
        ("one device only", "replicas: parameter 2 differs between cpu(0) and cpu(1)"),
        ("noise", "repeatability: training on 3 devices, done twice, gave different"),
    ],
)
def test_a_broken_update_is_found(bug, words, monkeypatch, failures):
    correct, noise = gluonpar.train_batch, np.random.RandomState(0)

    def wrong(X, y, device_params, ctx, lr, model):
        before = device_params[1][2].copy()
        correct(X, y, device_params, ctx, lr * 1.05 if bug == "rate" else lr, model)
        if bug == "one device only":
            before.copyto(device_params[1][2])
        if bug == "noise":
            number = float(noise.uniform(1e-6, 2e-6))
            for params in device_params:
                params[3] += number

    monkeypatch.setattr(self_test, "train_batch", wrong)
    (found,) = failures("training by train_batch")
    assert words in found


def test_a_trainer_that_divides_by_the_wrong_number_is_found(monkeypatch, failures):
    step = gluonpar.Trainer.step
    monkeypatch.setattr(gluonpar.Trainer, "step", lambda self, n: step(self, n // 3))
    (found,) = failures("training by Trainer")
    assert "updates: parameter 0 differs by" in found


def test_gradients_that_are_not_summed_are_found(monkeypatch, failures):
    monkeypatch.setattr(collectives, "allreduce", lambda data: None)
    (found,) = failures("LeNet")
    assert "gradients, 3 devices against one: " in found


def make(*blocks, ctx=CPUS, hybridized=False):
    net = resnet.chain(*blocks)
    net.initialize(mx.init.Xavier(), ctx=ctx)
    if hybridized:
        net.hybridize(static_alloc=True, static_shape=True)
    return net


def values(net):
    return [a.asnumpy().tobytes() for p in net.collect_params().values() for a in p.list_data()]


NETWORKS = {
    "plain": (lambda: (nn.Conv2D(4, 3, activation="relu"), nn.Dense(3)), ""),
    "batch norm": (lambda: (nn.Conv2D(4, 3), nn.BatchNorm(), nn.Dense(3)), "BatchNorm: each"),
    "dropout": (lambda: (nn.Dense(9), nn.Dropout(0.5), nn.Dense(3)), "random numbers: "),
    "sync": (lambda: (nn.Conv2D(4, 3), SyncBatchNorm(), nn.Dense(3)), "SyncBatchNorm: "),
}


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_correct_network_passes_and_its_values_are_kept(world, kind, hybridized):
    blocks, note = NETWORKS[kind]
    net = make(*blocks(), hybridized=hybridized)
    verify(net, LOSS, BATCH, CPUS)
    before = values(net)
    lines = verify(net, LOSS, BATCH, CPUS)
    assert values(net) == before
    assert len(lines) == (5 if note else 4)
    assert lines[1].startswith(note or "repeatability: the same bits twice")
    assert "gradients, 3 devices against one: largest relative difference" in lines[-1]


def test_fewer_samples_than_devices():
    assert verify(make(nn.Dense(3)), LOSS, (X[:2], BATCH[1][:2]), CPUS)


class ByDevice(gluon.Block):
    """A network with a planted bug on some devices, or in some passes."""

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
        (lambda out, device, _: out * np.nan if device == 2 else out, "losses differs by nan"),
        (lambda out, device, _: mx.nd.BlockGrad(out) * 0 + out.detach() + 0 * out
         if device == 1 else out, "gradients, 3 devices against one: .*weight differs by"),
        (lambda out, device, calls: out * (1 + 1e-5 * calls), "repeatability: the whole batch on "),
        (lambda out, device, calls: out * (1 + 1e-5 * calls) if device else out,
         "repeatability: a pass on 3 devices, done twice, gave different losses"),
    ],
)  # fmt: skip
def test_a_network_that_differs_by_device_or_between_passes_is_found(change, words):
    with pytest.raises(Wrong, match=words):
        verify(ByDevice(change), LOSS, BATCH, CPUS)


def test_replicas_that_differ_are_found():
    net = make(nn.Dense(3, in_units=64))
    net[0].bias.list_data()[1][2] = 5
    with pytest.raises(Wrong, match=r"bias differs between cpu\(0\) and cpu\(1\), by up to 5"):
        verify(net, LOSS, BATCH, CPUS)


def test_requests_that_cannot_be_verified_are_errors_with_the_remedy():
    net = make(nn.Dense(3), ctx=CPUS[:2])
    with pytest.raises(RuntimeError, match=r"not initialized on context cpu\(2\)"):
        verify(net, LOSS, BATCH, CPUS)
    with pytest.raises(ValueError, match=r"cpu\(1\) more than once"):
        verify(net, LOSS, BATCH, [CPUS[1], CPUS[1]])
    mean = lambda scores, y: LOSS(scores, y).mean()  # noqa: E731
    with pytest.raises(ValueError, match=r"one loss per sample, .*\(1,\) for 10 samples"):
        verify(make(nn.Dense(3)), mean, BATCH, CPUS)
    net = make(nn.Dense(3))
    net.collect_params().setattr("grad_req", "add")
    with pytest.raises(ValueError, match="grad_req='write', got 'add'"):
        verify(net, LOSS, BATCH, CPUS)
    with pytest.raises(ValueError, match="use gluonpar.SyncBatchNorm"):
        verify(make(gluon.contrib.nn.SyncBatchNorm(num_devices=3), nn.Dense(3)), LOSS, BATCH, CPUS)


def test_rounding_in_an_array_that_is_nearly_zero_is_allowed():
    want = {"big": np.full(3, 100, "float32"), "none": np.zeros(3, "float32")}
    assert check_close(want, {**want, "none": np.full(3, 1e-5, "float32")}, "what")
    with pytest.raises(Wrong, match="none differs"):
        check_close(want, {**want, "none": np.full(3, 1e-2, "float32")}, "what")
