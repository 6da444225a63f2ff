"""The .params files of the training scripts are MXNet's own: mx.nd.load and Gluon read them."""

import functools

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from gluonpar.models import lenet, resnet
from gluonpar.training import command_line, workloads
from gluonpar.training.data import dataset

NETWORKS = {"lenet": lenet.LeNet, "resnet18": lambda: resnet.resnet18(width=2)}


@pytest.mark.parametrize("model", NETWORKS)
def test_gluon_loads_what_the_scripts_keep_and_scores_what_they_said(
    model, tmp_path, monkeypatch, capsys
):
    narrow = functools.partial(workloads.ResNet18, width=2)
    monkeypatch.setitem(workloads.LEARNERS, "resnet18", narrow)
    options = "--dataset synthetic --device cpu --num-gpus 2 --limit 512 --batch-size 8 --epochs 1"
    options = [*options.split(), "--lr", "0.1", "--save-dir", str(tmp_path)]
    assert command_line.main("Train.", options, model=model) == 0
    path = str(tmp_path / f"{model}-epoch-0001.params")
    net, made = NETWORKS[model](), dataset.load("synthetic")
    net.load_parameters(path)
    scores = net(lenet.standardize(mx.nd.array(made.test_images, dtype="uint8"))).asnumpy()
    right = (scores.argmax(axis=1) == made.test_labels).mean()
    assert f"test acc {right:.2f}" in capsys.readouterr().out and right > 0.15
    read = mx.nd.load(path)
    for name, param in net._collect_params_with_prefix().items():
        assert read[name].asnumpy().tobytes() == param.data().asnumpy().tobytes()


def test_lenet_as_a_block_is_the_function():
    net = lenet.LeNet(0.1)
    net.initialize()
    X = mx.nd.random.uniform(shape=(2, 1, 28, 28))
    params = [getattr(net, str(i)).data() for i in range(8)]
    assert [param.shape for param in params] == list(lenet.LENET_SHAPES)
    want = gluonpar.lenet(X, params).asnumpy()
    assert abs(want).max() > 0.01
    for hybridized in (False, True):
        net.hybridize(hybridized)
        np.testing.assert_allclose(net(X).asnumpy(), want, rtol=1e-5, atol=1e-7)
    assert abs(params[4].asnumpy().std() - 0.1) < 0.002 and not params[5].asnumpy().any()
