"""oneDNN's own layouts: predicting may move a weight about in memory, and must keep its values.

In a forward pass without training, MXNet 1.9.1 lets oneDNN put a convolution's weight into a layout
of its own, in place. Of a weight that is a view of a larger array it writes to that array's begin.
"""

import mxnet as mx
import numpy as np
import pytest
from contexts import contexts
from gluon_runs import STATIC
from mxnet import autograd
from mxnet.gluon import nn

from gluonpar import split_and_load
from gluonpar.gluon.trainer import Trainer
from gluonpar.models.losses import softmax_cross_entropy

CTX = contexts(2)
CHANNELS = 64  # for which oneDNN has layouts of its own
SHAPES = [(CHANNELS, CHANNELS, 3, 3), (CHANNELS,)] * 2


def start():
    """Two convolutions' weights and biases."""
    rng = np.random.RandomState(0)
    return [rng.normal(scale=0.05, size=shape).astype("float32") for shape in SHAPES]


def make_batches():
    rng = np.random.RandomState(1)
    for n in (8, 5, 6):
        X = rng.normal(size=(n, CHANNELS, 6, 6)).astype("float32")
        yield X, rng.randint(0, CHANNELS, size=n)


def predict(net):
    """Predict each batch on each device, outside autograd.record."""
    for X, _ in make_batches():
        for c in CTX:
            net(mx.nd.array(X, ctx=c)).wait_to_read()


def make_net(hybridize=None):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(CHANNELS, 3, in_channels=CHANNELS, activation="relu"))
        net.add(nn.Conv2D(CHANNELS, 3, in_channels=CHANNELS), nn.GlobalAvgPool2D(), nn.Flatten())
    net.initialize(ctx=CTX)
    for param, value in zip(net.collect_params().values(), start()):
        param.set_data(mx.nd.array(value))
    if hybridize is not None:
        net.hybridize(**hybridize)
    return net


@pytest.mark.parametrize("hybridize", [None, {}, STATIC], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_gluon_network_trained_after_predicting_is_trained_alone(hybridize, optimizer):
    def train(predicts):
        net = make_net(hybridize)
        params = net.collect_params().values()
        trainer = Trainer(net.collect_params(), optimizer, {"learning_rate": 0.01})
        for X, y in make_batches():
            if predicts:
                predict(net)
            with autograd.record():
                losses = [
                    softmax_cross_entropy(net(X_shard), y_shard)
                    for X_shard, y_shard in split_and_load((X, y), CTX)
                ]
            autograd.backward(losses)
            trainer.step(len(X))
        if predicts:
            predict(net)
        return [copy.asnumpy() for param in params for copy in param.list_data()]

    alone = train(False)
    assert all((value != before).any() for value, before in zip(alone[::2], start()))
    np.testing.assert_equal(train(True), alone)
