"""oneDNN's own layouts: predicting may move a weight about in memory, and must keep its values.

In a forward pass without training, MXNet 1.9.1 lets oneDNN put a convolution's weight into a layout
of its own, in place. Of a weight that is a view of a larger array it writes to that array's begin.
"""

import mxnet as mx
import numpy as np
import pytest
from contexts import device
from gluon_runs import STATIC
from mxnet import autograd
from mxnet.gluon import nn

import gluonpar
from gluonpar import replicas
from gluonpar.gluon.trainer import Trainer
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.runtime import cached_op, memory

CTX = [device(0), device(1)]
CHANNELS, NUM_STEPS, LR = 64, 3, 0.1
SHAPES = [(CHANNELS, CHANNELS, 3, 3), (CHANNELS,)] * 2


def start():
    """Two convolutions' weights and biases: sizes for which oneDNN has layouts of its own."""
    rng = np.random.RandomState(0)
    return [rng.normal(scale=0.05, size=shape).astype("float32") for shape in SHAPES]


def make_batches():
    rng = np.random.RandomState(1)
    sizes = (8, 5, 6)[:NUM_STEPS]
    return [
        (rng.normal(size=(n, CHANNELS, 6, 6)).astype("float32"), rng.randint(0, CHANNELS, size=n))
        for n in sizes
    ]


def scores(X, params):
    """Every channel of the second convolution is a class; arrays or symbols."""
    F, options = cached_op.operators(X), {"kernel": (3, 3), "num_filter": CHANNELS}
    W1, b1, W2, b2 = params
    h = F.Activation(F.Convolution(X, W1, b1, **options), act_type="relu")
    return F.mean(F.Convolution(h, W2, b2, **options), axis=(2, 3))


def operator_by_operator(X, params):
    return scores(X, params)


traced = cached_op.traceable(lambda X, params: scores(X, params))
MODELS = {"imperative": operator_by_operator, "traced": traced}


def make_replicas(get_params=gluonpar.get_params):
    return [get_params([mx.nd.array(value) for value in start()], c) for c in CTX]


def predict(model, device_params):
    """Losses of all batches on all devices, outside autograd.record; waits for them."""
    for X, y in make_batches():
        for params, c in zip(device_params, CTX):
            shard = mx.nd.array(X, ctx=c), mx.nd.array(y, ctx=c)
            cached_op.losses(model, softmax_cross_entropy, *shard, params).wait_to_read()


def assert_bits(device_params, want):
    for params in device_params:
        for param, value in zip(params, want):
            np.testing.assert_array_equal(param.asnumpy(), value)


def as_lists(params, ctx):
    return list(gluonpar.get_params(params, ctx))


@pytest.mark.parametrize("get_params", [gluonpar.get_params, as_lists])
@pytest.mark.parametrize("way", MODELS)
def test_predicting_changes_no_bit_of_a_parameter_or_gradient(way, get_params):
    device_params = make_replicas(get_params)
    for params in device_params:
        for i, param in enumerate(params):
            param.grad[:] = i + 1
    predict(MODELS[way], device_params)
    assert_bits(device_params, start())
    for params in device_params:
        for i, param in enumerate(params):
            np.testing.assert_array_equal(param.grad.asnumpy(), np.full(param.shape, i + 1))
    predict(MODELS[way], device_params)
    assert_bits(device_params, start())


@pytest.mark.parametrize("algorithm", [None, "ring"])
@pytest.mark.parametrize("way", MODELS)
def test_training_after_each_prediction_is_training_alone(way, algorithm):
    def train(predicts):
        device_params = make_replicas()
        for X, y in make_batches():
            if predicts:
                predict(MODELS[way], device_params)
            gluonpar.train_batch(
                X, y, device_params, CTX, LR, model=MODELS[way], algorithm=algorithm
            )
        if predicts:
            predict(MODELS[way], device_params)
        return [[param.asnumpy() for param in params] for params in device_params]

    alone = train(False)
    assert all((value != before).any() for value, before in zip(alone[0], start()))
    for mine, theirs in zip(train(True), alone):
        for a, b in zip(mine, theirs):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("way", MODELS)
def test_a_step_without_backward_after_predicting_still_finds_the_weights(way):
    """The update alone reads memory that oneDNN has just laid out in its own way."""
    device_params = make_replicas()
    for params in device_params:
        for param in params:
            param.grad[:] = 1
    predict(MODELS[way], device_params)
    for params in device_params:
        gluonpar.sgd(params, lr=0.25, batch_size=4)
    assert_bits(device_params, [value - np.float32(0.0625) for value in start()])


def make_net(hybridize):
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


def copies(net):
    """Per device, its parameters."""
    return list(zip(*[param.list_data() for param in net.collect_params().values()]))


def predict_by(net):
    for X, _ in make_batches():
        for c in CTX:
            net(mx.nd.array(X, ctx=c)).wait_to_read()


HYBRIDIZED = pytest.mark.parametrize("hybridize", [None, {}, STATIC], ids=str)


@HYBRIDIZED
def test_a_gluon_network_under_a_trainer_predicts_without_changing_a_bit(hybridize):
    net = make_net(hybridize)
    Trainer(net.collect_params(), "sgd", {"learning_rate": LR})
    for _ in range(2):
        predict_by(net)
        assert_bits(copies(net), start())


@HYBRIDIZED
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_gluon_network_trained_after_predicting_is_trained_alone(hybridize, optimizer):
    def train(predicts):
        net = make_net(hybridize)
        trainer = Trainer(net.collect_params(), optimizer, {"learning_rate": 0.01})
        for X, y in make_batches():
            if predicts:
                predict_by(net)
            with autograd.record():
                losses = [
                    softmax_cross_entropy(net(X_shard), y_shard)
                    for X_shard, y_shard in gluonpar.split_and_load((X, y), CTX)
                ]
            autograd.backward(losses)
            trainer.step(len(X))
        if predicts:
            predict_by(net)
        return [[param.asnumpy() for param in params] for params in copies(net)]

    alone = train(False)
    assert all((value != before).any() for value, before in zip(alone[0], start()))
    for mine, theirs in zip(train(True), alone):
        for a, b in zip(mine, theirs):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_no_two_parameters_share_memory(num_devices):
    """What all this rests on, for Replicas and for a Trainer's network."""
    params = [param for of_device in make_replicas()[:num_devices] for param in of_device]
    net = make_net(None)
    Trainer(net.collect_params(), "sgd")
    params += [param for of_device in copies(net)[:num_devices] for param in of_device]
    assert len({memory.chunk(param) for param in params}) == len(params) == 8 * num_devices
    assert isinstance(make_replicas()[0], replicas.Replica)
