"""Running statistics: each device's own while training, one device's or their mean on request."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from gluonpar import split_and_load
from gluonpar.batch_norm.running_statistics import average_statistics, broadcast_statistics
from gluonpar.gluon.trainer import Trainer
from tests.support.contexts import device

K = 3
CTX = [device(i) for i in range(K)]


@pytest.fixture
def net():
    """Trained for a step, so that each device has statistics of its own."""
    net = nn.HybridSequential()
    net.add(nn.Dense(4), nn.BatchNorm(), nn.Dense(2))
    net.initialize(ctx=CTX)
    backward(net)
    mx.nd.waitall()
    return net


def backward(net):
    X = np.random.RandomState(0).normal(size=(12, 5)).astype("float32")
    with autograd.record():
        outs = [net(shard) for shard in split_and_load(X, CTX)]
    autograd.backward(outs)


def statistics(net):
    """(2 statistics, K devices, 4 channels)."""
    layer = net[1]
    return np.array(
        [[a.asnumpy() for a in p.list_data()] for p in (layer.running_mean, layer.running_var)]
    )


def weights(net):
    params = net.collect_params().values()
    return [a.asnumpy() for p in params if p.grad_req != "null" for a in p.list_data()]


def test_a_resumed_trainer_leaves_each_device_its_own(net, tmp_path):
    params = net.collect_params()
    trainer = Trainer(params, "sgd")
    trainer.step(12)
    trainer.save_states(tmp_path / "states")
    resumed = Trainer(params, "sgd")
    resumed.load_states(tmp_path / "states")
    backward(net)
    before = statistics(net)
    assert (before[:, 0] != before[:, 1]).all()
    resumed.step(12)
    resumed.check_replicas()  # which leaves them out
    np.testing.assert_array_equal(statistics(net), before)


@pytest.mark.parametrize("root", [None, *range(K)])
def test_all_devices_get_the_mean_or_those_of_one_and_weights_are_left_alone(net, root):
    before, kept = statistics(net), weights(net)
    average_statistics(net) if root is None else broadcast_statistics(net, root)
    want = before.mean(axis=1) if root is None else before[:, root]
    after = statistics(net)
    for k in range(K):
        np.testing.assert_allclose(after[:, k], want, rtol=1e-6 if root is None else 0)
        np.testing.assert_array_equal(after[:, k], after[:, 0])
    for now, then in zip(weights(net), kept):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("root", [-1, K])
def test_a_root_out_of_range_is_refused(net, root):
    with pytest.raises(ValueError, match=f"from 0 to {K - 1}, got {root}"):
        broadcast_statistics(net, root)


def test_names_of_symbol_blocks_are_known_too():
    x = mx.sym.var("data", dtype="float32")
    out = mx.sym.BatchNorm(x, name="bn")
    block = mx.gluon.SymbolBlock(out, x)
    block.initialize(ctx=CTX)
    for i, c in enumerate(CTX):
        with autograd.record():
            out = block(mx.nd.array([[i], [i + 2.0]], ctx=c))
        out.backward()
    [mean] = [p for name, p in block.collect_params().items() if name.endswith("moving_mean")]
    means = [array.asnumpy() for array in mean.list_data()]
    assert means[0] != means[1]
    want = np.mean(means, axis=0)
    average_statistics(block)
    for array in mean.list_data():
        np.testing.assert_allclose(array.asnumpy(), want, rtol=1e-6)
