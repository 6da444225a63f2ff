"""train: a run repeats bit for bit, learns, and reports where it failed."""

import io

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import gluonpar
from gluonpar import metrics, step
from gluonpar.models import lenet, softmax_cross_entropy
from gluonpar.training import Configuration, Console, Run
from gluonpar.training.data import dataset
from gluonpar.training.workloads import INIT_SCALE, LeNetWorkload, ResNet18Workload

SMALL = {"batch_size": 32, "num_epochs": 1, "limit": 96}


def train(num_gpus=2, **more):
    options = {**SMALL, "dataset": "synthetic", "device": "cpu", "verbose": False, **more}
    return gluonpar.train(num_gpus, **options)


def bits(history):
    return [param.asnumpy().tobytes() for param in history.params]


def figures(history):
    return [(epoch.loss, epoch.test_accuracy) for epoch in history.epochs]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_one_seed_and_number_of_devices_give_the_same_bits(k):
    first, second, other = (train(k, num_epochs=2, seed=seed) for seed in (0, 0, 1))
    assert bits(first) == bits(second)
    for one, another in zip(first.params, other.params):
        if one.ndim > 1:  # other initial values, not only another order
            assert abs(one.asnumpy() - another.asnumpy()).max() > 0.1
    assert figures(first) == figures(second)


@pytest.mark.parametrize("k", [1, 3])
def test_a_run_on_k_devices_equals_a_plain_loop_with_gluons_own_trainer(k):
    history = train(k, batch_size=16, limit=81, num_epochs=2, lr=0.05)  # one sample is left over
    mx.random.seed(0)
    net, start = lenet.LeNet(), lenet.init_lenet(INIT_SCALE)
    net.initialize()
    for i, value in enumerate(start):
        net.params.get(str(i)).set_data(value)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    data, shuffle = dataset.load("synthetic", limit=81), np.random.RandomState(0)
    for _ in range(2):
        for X, y in dataset.batches(data.train_images, data.train_labels, 16, shuffle):
            with autograd.record():
                scores = net(lenet.standardize(mx.nd.array(X, dtype="uint8")))
                loss = softmax_cross_entropy(scores, mx.nd.array(y))
            loss.backward()
            trainer.step(len(X))
    for i, param in enumerate(history.params):
        one, other = param.asnumpy(), net.params.get(str(i)).data().asnumpy()
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-5)
        assert not np.array_equal(other, start[i].asnumpy())


@pytest.mark.parametrize("model", ["lenet", "resnet18"])
def test_numpy_semantics_change_nothing_and_are_the_callbacks(model, monkeypatch):
    monkeypatch.setattr(ResNet18Workload, "width", 2)

    def semantics():
        return mx.util.is_np_shape(), mx.util.is_np_array()

    plain, seen = train(2, model=model), []
    with mx.util.np_shape(True), mx.util.np_array(True):
        of_np = train(2, model=model, on_epoch=lambda epoch: seen.append(semantics()))
        assert semantics() == (True, True)
    assert seen == [(True, True)]
    assert bits(of_np) == bits(plain)
    assert figures(of_np) == figures(plain)


def test_a_run_learns_and_the_historys_parameters_reach_its_accuracy():
    learned = train(2, limit=600, num_epochs=4, lr=0.1)  # from 0.2 on, rounding decides
    losses = [epoch.loss for epoch in learned.epochs]
    assert losses[-1] < losses[0] - 0.5
    assert learned.epochs[-1].test_accuracy > 0.4
    test = dataset.load("synthetic", limit=600)
    images = lenet.standardize(mx.nd.array(test.test_images, dtype="uint8"))
    predicted = lenet.lenet(images, learned.params).asnumpy().argmax(axis=1)
    share = (predicted == test.test_labels).mean()
    assert share == pytest.approx(learned.epochs[-1].test_accuracy, abs=0.002)


@pytest.mark.parametrize("number", [3, 6, 8])
def test_the_first_update_that_ruins_the_parameters_is_named_though_losses_stay_finite(
    monkeypatch, tmp_path, number
):
    """A NaN before a relu becomes 0, so the losses of the next batches, if any, are finite.

    Batches are of the first or the second epoch of six.
    """
    steps = iter(range(1, 100))
    update = step.allreduce_sgd

    def ruin(exchange, buckets, *rest):
        update(exchange, buckets, *rest)
        if next(steps) == number:
            for copies in (copies for bucket in buckets for copies in bucket.copies):
                if copies.params[0].shape == (20, 1, 3, 3):  # before the first relu
                    copies.params[0][:] = np.nan

    monkeypatch.setattr(step, "allreduce_sgd", ruin)
    epoch, batch = (1, number) if number <= 6 else (2, number - 6)
    words = f"parameters .* after batch {batch} of 6, epoch {epoch}, with lr=0.2"
    options = {"limit": 48, "batch_size": 8, "num_epochs": 2, "log_interval": 4}
    with pytest.raises(metrics.DivergedError, match=words):
        train(1, **options, save_dir=str(tmp_path))
    assert len(list(tmp_path.glob("*.params"))) == epoch - 1


def test_a_quiet_run_prints_nothing(capfd):
    train(2, limit=8)
    assert capfd.readouterr() == ("", "")


def test_the_files_hold_each_epochs_parameters(tmp_path):
    history = train(2, num_epochs=2, save_dir=str(tmp_path))
    names = ["lenet-epoch-0001.params", "lenet-epoch-0002.params"]
    assert sorted(path.name for path in tmp_path.glob("*.params")) == names
    first, second = (mx.nd.load(str(tmp_path / name)) for name in names)
    assert [second[str(i)].asnumpy().tobytes() for i in range(8)] == bits(history)
    assert [first[str(i)].asnumpy().tobytes() for i in range(8)] == bits(train(2))


@pytest.mark.parametrize(
    ("limit", "steps"), [(8, (1, 1)), (24, (2, 3)), (128, (6, 16)), (400, (6, 25))]
)
def test_the_profile_has_twenty_steps_of_the_first_epoch_and_changes_no_bit(
    limit, steps, monkeypatch
):
    """After the warm-up, or as many as there are."""
    states, set_state = [], mx.profiler.set_state
    monkeypatch.setattr(mx.profiler, "set_state", lambda s: (states.append(s), set_state(s)))
    options = {"limit": limit, "batch_size": 8, "num_epochs": 2}
    options.update(dataset="synthetic", device="cpu")
    out = io.StringIO()
    run = Run(Configuration(2, profile=True, **options), Console(out))
    plain = train(2, **options)
    run.train()
    assert run.profiler.steps == steps and states == ["run", "stop"]
    first, rest = out.getvalue().partition("profile of epoch 1: ")[2].split("\n", 1)
    assert first.startswith("steps {} to {}, ".format(*steps)) and "\ntotal " in rest
    assert bits(run.history) == bits(plain)
    assert figures(run.history) == figures(plain)


def test_python_is_never_more_than_a_few_steps_ahead(monkeypatch):
    losses, waits = [], []

    def step(self, X, y, batch_size, lr):
        losses.append(mx.nd.full((1,), 100 + len(losses)))
        return losses[-1:]

    def wait(array):
        waits.append((len(losses), array.asscalar() - 100))

    monkeypatch.setattr(LeNetWorkload, "step", step)
    monkeypatch.setattr(mx.nd.NDArray, "wait_to_read", wait)
    train(2, limit=160, batch_size=8, num_epochs=1, log_interval=1000)
    assert len(losses) == 20
    of_losses = [(number, i) for number, i in waits if i >= 0]  # others are of the evaluation
    ahead = metrics.BATCHES_IN_FLIGHT
    assert of_losses == [(i + ahead + 1, i) for i in range(20 - ahead)]


def test_weights_change_the_shards_and_nothing_but_rounding(monkeypatch):
    plain, sizes, add = train(2), [], metrics.LossMeter.add

    def noting(self, losses, params=()):
        if params:  # not the evaluation
            sizes.append([loss.size for loss in losses])
        add(self, losses, params)

    monkeypatch.setattr(metrics.LossMeter, "add", noting)
    weighted = train(2, weights=(1, 3))
    assert sizes == [[8, 24]] * 3
    for one, other in zip(weighted.params, plain.params):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-3, atol=1e-5)
