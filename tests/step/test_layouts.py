"""oneDNN's own layouts: predicting may move a weight about in memory, and must keep its values.

In a forward pass without training, MXNet 1.9.1 lets oneDNN put a convolution's weight into a layout
of its own, in place. Of a weight that is a view of a larger array it writes to that array's begin.
"""

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

from gluonpar.gluon.trainer import Trainer
from tests.support import gluon_runs as runs
from tests.support.contexts import contexts

CTX = contexts(2)
CHANNELS = 64  # for which oneDNN has layouts of its own


def train(predicts, hybridize, optimizer):
    """Return the initial values, and those on all devices after three steps."""
    rng, net = np.random.RandomState(0), nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(CHANNELS, 3, in_channels=CHANNELS, activation="relu"))
        net.add(nn.Conv2D(CHANNELS, 3, in_channels=CHANNELS), nn.GlobalAvgPool2D(), nn.Flatten())
    net.initialize(ctx=CTX)
    start = [rng.normal(0, 0.05, p.shape) for p in net.collect_params().values()]
    runs.fill(net, start)
    if hybridize is not None:
        net.hybridize(**hybridize)
    trainer = Trainer(net.collect_params(), optimizer, {"learning_rate": 0.01})

    def predict(X):
        for c in CTX if predicts else ():
            net(mx.nd.array(X, ctx=c)).wait_to_read()

    for n in (8, 5, 6):
        X = rng.normal(size=(n, CHANNELS, 6, 6)).astype("float32")
        predict(X)
        runs.train(net, trainer, [(X, rng.randint(0, CHANNELS, size=n))], CTX)
    predict(X)
    return start, [runs.values(net, device) for device in range(2)]


@pytest.mark.parametrize("hybridize", [None, {}, runs.STATIC], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_gluon_network_trained_after_predicting_is_trained_alone(hybridize, optimizer):
    start, alone = train(False, hybridize, optimizer)
    assert all((value != before).any() for value, before in zip(alone[0], start))
    np.testing.assert_equal(train(True, hybridize, optimizer)[1], alone)
