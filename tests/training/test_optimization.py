"""Optimizers of a run: as in MXNet, and on K devices as on one."""

import math
import warnings
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import gluonpar
from gluonpar.models import lenet
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.training import Configuration, workloads
from gluonpar.training.configuration import optimizer_names
from gluonpar.training.data import dataset

SMALL = {"dataset": "synthetic", "device": "cpu", "batch_size": 16, "limit": 81, "num_epochs": 2}
RUNS = {
    "adam": {"optimizer": "adam", "lr": 0.003},
    "momentum, decay": {"momentum": 0.9, "wd": 1e-3, "lr": 0.05},
    "plain": {"lr": 0.05},  # by train_batch
}


def train(k=2, **more):
    return gluonpar.train(k, verbose=False, **{**SMALL, **more})


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_k_devices_equals_a_plain_loop_with_gluons_own_trainer(name, k):
    options = RUNS[name]
    history = train(k, **options)
    names = {"lr": "learning_rate", "momentum": "momentum", "wd": "wd"}
    theirs = {names[name]: value for name, value in options.items() if name in names}
    mx.random.seed(0)
    net, start = lenet.LeNet(), lenet.init_lenet(workloads.INIT_SCALE)
    net.initialize()
    for i, value in enumerate(start):
        net.params.get(str(i)).set_data(value)
    trainer = gluon.Trainer(net.collect_params(), options.get("optimizer", "sgd"), theirs)
    data, shuffle = dataset.load("synthetic", limit=SMALL["limit"]), np.random.RandomState(0)
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


def test_the_default_learning_rate_is_the_models_or_the_optimizers():
    assert Configuration().lr == 0.2
    assert Configuration(model="resnet18").lr == 0.1
    for name in ("adam", "rmsprop", "nag"):
        assert Configuration(optimizer=name).lr == mx.optimizer.create(name).learning_rate
    assert Configuration(optimizer="signum").momentum == 0.9
    assert Configuration(optimizer="signum", momentum=0.0).optimizer_arguments()["momentum"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", optimizer_names())
def test_every_optimizer_of_mxnet_trains(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXNet's own, about some of them
        history = train(optimizer=name, num_epochs=1)
    assert math.isfinite(history.epochs[0].loss)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "sdg"}, "optimizer must be one of .*adam.*, got 'sdg'"),
        ({"momentum": 1.0}, "momentum .*1.0"),
        ({"momentum": math.nan}, "momentum .*nan"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum .* adam takes none"),
        ({"wd": -1e-4}, "wd .*-0.0001"),
        ({"early_stop": 0}, "early_stop must be at least 1, got 0"),
    ],
)
def test_values_that_are_not_possible_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Configuration(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpus": "2"}, "num_gpus must be an integer, got '2'"),
        ({"num_gpus": 2.0}, "num_gpus must be an integer, got 2.0"),
        ({"batch_size": None}, "batch_size must be an integer, got None"),
        ({"limit": True}, "limit must be an integer, got True"),
        ({"resume": True}, "resume must be a string, got True"),
        ({"lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"gpus": "02"}, "gpus must be a list of integers, got '02'"),
        ({"onnx": 1}, "onnx must be True or False, got 1"),
    ],
)
def test_values_of_another_type_are_refused(options, words):
    with pytest.raises(TypeError, match=words):
        gluonpar.train(**options)


def test_paths_lists_and_numpys_numbers_are_taken():
    given = Configuration(np.int64(3), lr=np.float32(0.5), gpus=[0, 2], data_dir=Path("a"))
    assert (given.num_gpus, given.lr, given.gpus, given.data_dir) == (3, 0.5, (0, 2), "a")
