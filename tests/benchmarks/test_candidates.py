"""The training benchmark's candidates: all train the same function."""

import dataclasses

import horovod_stand_in
import mxnet as mx
import numpy as np
import pytest

from benchmarks.comparison import TOLERANCE, Comparison
from benchmarks.training import book, candidates, gluon, train_batch, workloads
from benchmarks.training.candidates import CANDIDATES, OURS, TRAINER, Setting, comparable

CPUS = [("cpu", 0), ("cpu", 1)]


@pytest.fixture
def thin(monkeypatch):
    """The wide workloads, too narrow to take long."""
    for name, made in (("mlp", workloads.mlp(20)), ("resnet18", workloads.resnet18(8))):
        monkeypatch.setitem(workloads.WORKLOADS, name, made)


def all_of_mxnet(task):
    """Return the trainings of the candidates that exchange and use MXNet only, by name."""
    modules = {f"training.{m.__name__.split('.')[-1]}": m for m in (train_batch, book, gluon)}
    return {
        name: modules[of.module].make(task, **of.options)
        for name, of in CANDIDATES.items()
        if of.exchanges and of.module in modules
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "batch_size", "devices"),
    [
        ("lenet", 4, CPUS),
        ("lenet", 5, CPUS),
        ("mlp", 4, CPUS),
        ("mlp", 5, CPUS),
        ("resnet18", 4, CPUS),
        ("resnet18", 5, CPUS[:1]),
    ],
)
def test_all_of_mxnets_candidates_train_the_same_function(thin, workload, batch_size, devices):
    task = workloads.task(workload, batch_size, devices)
    setting = Setting(workload, [mx.Context(*device) for device in devices], batch_size)
    trainings = all_of_mxnet(task)
    assert len(trainings) >= 6
    first = {name: training.loss() for name, training in trainings.items()}
    for training in trainings.values():
        training.run(3)
    last = {name: training.loss() for name, training in trainings.items()}
    same = [name for name in trainings if comparable(name, setting)]
    whole = {"one context", "one context imported"}
    assert set(trainings) - set(same) == (whole if setting.shards_matter else set())
    for losses in (first, last):
        agreed = losses["one context" if "one context" in same else TRAINER]
        # rounding alone; a batch norm over two images divides by what may be small
        rtol = 1e-4 if workload == "resnet18" else 1e-5
        np.testing.assert_allclose([losses[name] for name in same], agreed, rtol=rtol)
    assert last[OURS] < first[OURS] - TOLERANCE


@pytest.mark.slow
def test_each_device_normalises_its_own_shard(thin):
    task = workloads.task("resnet18", 4, CPUS)
    whole, cut = gluon.make(task, one_context=True), gluon.make(task)
    shards = [gluon.make(part) for part in halves(task)]
    assert cut.loss() == pytest.approx(np.mean([s.loss() for s in shards]), rel=1e-5)
    assert abs(cut.loss() - whole.loss()) > TOLERANCE


def halves(task):
    each = [dataclasses.replace(task, devices=task.devices[:1]) for _ in range(2)]
    return [
        dataclasses.replace(part, X=task.X[2 * i : 2 * i + 2], y=task.y[2 * i : 2 * i + 2])
        for i, part in enumerate(each)
    ]


# A Trainer's first step copies device 0's moving statistics to the others while backward, which
# MXNet does not count among their writers, may be updating them: so that one on one device.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"), [("gluonpar", CPUS), ("book", CPUS), ("trainer device", CPUS[:1])]
)
def test_computing_the_loss_changes_nothing(thin, name, devices):
    task = workloads.task("resnet18", 4, devices)
    one, other = (all_of_mxnet(task)[name] for _ in "ab")
    for training in (one, other):
        training.run(1)
        if training is one:
            training.loss()
        training.run(1)
    for a, b in zip(arrays_of(one), arrays_of(other)):
        np.testing.assert_array_equal(a.asnumpy(), b.asnumpy())


def arrays_of(training):
    """Return all parameters and moving statistics."""
    if isinstance(training, gluon.Gluon):
        return [a for p in training.net.collect_params().values() for a in p.list_data()]
    if isinstance(training, book.Book):
        return sum(training.replicas + training.moving, [])
    return [param for params in training.device_params for param in params]


def test_moving_statistics_move_as_in_gluon(thin):
    task = workloads.task("resnet18", 4, CPUS[:1])
    plain, blocks = train_batch.make(task), gluon.make(task)
    for training in (plain, blocks):
        training.run(2)
    moved = plain.device_params[0][len(task.params) :]
    assert len(moved) == len(blocks.moving) == 34
    assert all(array.grad is None for array in moved)
    for a, b, start in zip(moved, blocks.moving, task.moving):
        np.testing.assert_allclose(a.asnumpy(), b.data().asnumpy(), rtol=1e-4, atol=1e-6)
        assert (a.asnumpy() != start).any()


def test_the_book_s_resnet_18_has_11_million_parameters():
    made = workloads.WORKLOADS["resnet18"]
    assert sum(int(np.prod(p.shape)) for p in made.parameters) == 11_175_818
    assert (made.input_shape, made.batch_size, len(made.norms)) == ((1, 28, 28), 64, 17)


def test_the_floor_does_not_exchange():
    floor = train_batch.make(workloads.task("lenet", 4, CPUS), exchange=False)
    first = floor.loss()
    floor.run(2)
    assert floor.loss() < first
    one, other = floor.device_params
    assert any((a != b).asnumpy().any() for a, b in zip(one, other))


def test_a_task_is_the_same_in_every_process():
    one, same = (workloads.task("mlp", 4, CPUS) for _ in range(2))
    for a, b in zip([one.X, one.y, *one.params], [same.X, same.y, *same.params]):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_memory_is_counted_once_by_purpose():
    training = train_batch.make(workloads.task("lenet", 4, CPUS))
    training.run(1)
    num_bytes = 4 * sum(value.size for value in training.device_params[0])
    before = training.memory()
    for device in before:
        assert (device["parameters"], device["gradients"]) == (num_bytes, num_bytes)
    kept = mx.nd.zeros((1000,), ctx=mx.cpu(1))
    views = [kept[:10], kept[5:20].reshape((3, 5))]
    after = training.memory()
    assert after[0] == before[0]
    assert after[1] == {**before[1], "others": before[1]["others"] + 4000}
    assert len(views) == 2


@pytest.mark.slow
def test_the_processes_of_horovod_train_as_one(tmp_path):
    """With a stand-in for Horovod: its launcher's arguments, the rate and the shards."""
    pythons = {"horovod": horovod_stand_in.write(tmp_path)}
    setting = Setting("lenet", [mx.cpu(0), mx.cpu(1)], 5, 2, 1, pythons=pythons)
    with Comparison() as comparison:
        rows = candidates.measure(setting, comparison, ["trainer device", "horovod"])
    assert (comparison.left_out, comparison.failed) == ({}, {})
    stock, horovod = rows
    assert horovod.version == "horovod stand-in, gloo"
    assert not horovod.imports_gluonpar and not horovod.wrong
    assert horovod.peak_bytes > 1.5 * stock.peak_bytes  # of two processes
    for of in ("first_loss", "last_loss"):
        assert getattr(horovod, of) == pytest.approx(getattr(stock, of), rel=1e-5)
