"""gluonpar.Trainer: K devices give what stock gluon.Trainer gives on one.

With every optimizer, any kind of network, in any precision, and however small the batch.
"""

import functools
import inspect

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

from gluonpar.gluon.trainer import Trainer
from tests.support import gluon_runs as runs
from tests.support.contexts import device
from tests.support.gluon_runs import assert_as_one, give_grads, weights
from tests.support.processes import run_python

OPTIMIZERS = sorted(mx.optimizer.Optimizer.opt_registry)
# Under momentum MXNet's DCASGD takes the truth of an array: it fails on one device too.
NO_MOMENTUM = {"dcasgd"}


def make_for(optimizer, **options):
    return functools.partial(runs.mlp, bias=optimizer != "groupadagrad", **options)


def options_of(optimizer, which):
    """The options to be tried: weight decay, or with it clipping, and momentum where it exists."""
    options = {"learning_rate": 0.05, "wd": 0.01}
    if optimizer == "groupadagrad":
        options["wd"] = 0.0  # all it supports; and only matrices, so no biases
    if which == "more":
        options["clip_gradient"] = 0.02
        known = inspect.signature(mx.optimizer.Optimizer.opt_registry[optimizer]).parameters
        if "momentum" in known and optimizer not in NO_MOMENTUM or optimizer == "ccsgd":
            options["momentum"] = 0.9
    return options


@functools.lru_cache(None)
def stock_of(optimizer, which):
    return runs.stock(optimizer, options_of(optimizer, which), make_for(optimizer))


@pytest.mark.parametrize(
    "which, k, deferred",
    [("wd", 3, True), ("more", 1, False), ("more", 2, True), ("more", 3, False), ("more", 4, True)],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_k_devices_train_as_one_with_every_optimizer(optimizer, which, k, deferred, small_buckets):
    make = make_for(optimizer, deferred=deferred)
    net, _ = runs.run(k, optimizer, options_of(optimizer, which), make)
    # sgld adds random numbers, and each GPU has a generator of its own: its replicas must be equal.
    noisy = optimizer == "sgld" and device().device_type == "gpu"
    want = runs.values(net) if noisy else stock_of(optimizer, which)
    assert_as_one(net, want)
    start = runs.start_values(bias=optimizer != "groupadagrad")
    assert all((a != b).any() for a, b in zip(want, start))


@pytest.mark.parametrize("clip", [0, -1.0])
def test_a_clip_gradient_of_zero_or_less_clips_nothing_as_in_mxnet(clip):
    options = {"learning_rate": 0.05, "clip_gradient": clip}
    net, _ = runs.run(2, "sgd", options)
    assert_as_one(net, runs.stock("sgd", options))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
@pytest.mark.parametrize("optimizer", ["sgd", "nag"])
def test_each_parameter_has_its_multipliers(optimizer, options, k):
    def make(ctx):
        net = runs.mlp(ctx)
        net[0].weight.lr_mult, net[1].weight.wd_mult, net[2].bias.lr_mult = 0.1, 10.0, 0.0
        return net

    options = {"learning_rate": 0.1, "wd": 0.1, **options}
    net, _ = runs.run(k, optimizer, options, make)
    assert_as_one(net, runs.stock(optimizer, options, make))
    np.testing.assert_array_equal(net[2].bias.list_data()[0].asnumpy(), runs.start_values()[5])


class Plain(gluon.Block):
    """A Block that is no HybridBlock, with a loop and a shared layer."""

    def __init__(self, ctx):
        super().__init__(prefix="plain_")
        with self.name_scope():
            self.first = nn.Dense(8, "tanh", in_units=6)
            self.again = nn.Dense(8, "tanh", in_units=8)
            self.shared = nn.Dense(8, "tanh", in_units=8, params=self.again.params)
            self.last = nn.Dense(3, in_units=8)
        self.initialize(ctx=ctx)
        rng = np.random.RandomState(5)
        runs.fill(self, [rng.normal(0, 0.4, p.shape) for p in self.collect_params().values()])

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = self.shared(self.again(x))
        return self.last(x)


def symbol_block(ctx):
    data = x = mx.sym.var("data", dtype="float32")
    x = mx.sym.tanh(mx.sym.FullyConnected(x, num_hidden=10, name="a"))
    net = gluon.SymbolBlock(mx.sym.FullyConnected(x, num_hidden=3, name="b"), data)
    net.initialize(ctx=ctx)
    rng = np.random.RandomState(6)
    shapes = [(10, 6), (10,), (3, 10), (3,)]
    for param, shape in zip(net.collect_params().values(), shapes):
        param.set_data(mx.nd.array(rng.normal(0, 0.4, shape)))
    return net


def convolution(ctx):
    """Kernels that oneDNN keeps in a layout of its own once it has computed with them."""
    net = nn.HybridSequential(prefix="conv_")
    with net.name_scope():
        net.add(nn.HybridLambda(lambda F, x: F.reshape(F.tile(x, reps=(1, 24)), (-1, 4, 6, 6))))
        net.add(nn.Conv2D(16, 3, activation="tanh", in_channels=4), nn.Dense(3, in_units=256))
    net.initialize(ctx=ctx)
    rng = np.random.RandomState(7)
    runs.fill(net, [rng.normal(0, 0.2, p.shape) for p in net.collect_params().values()])
    net.hybridize(**runs.STATIC)
    return net


NETS = {
    "block": Plain,
    "symbol block": symbol_block,
    "hybridized": functools.partial(runs.mlp, hybridize={}),
    "static_alloc": functools.partial(runs.mlp, hybridize={"static_alloc": True}),
    "static": functools.partial(runs.mlp, hybridize=runs.STATIC),
    "deferred hybridized": functools.partial(runs.mlp, deferred=True, hybridize={}),
    "deferred static": functools.partial(runs.mlp, deferred=True, hybridize=runs.STATIC),
    "convolution": convolution,
}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", NETS)
def test_any_kind_of_network_is_trained(name, optimizer, k, small_buckets):
    """Batch sizes change, and some are below the number of devices."""
    data = runs.batches((7, 2, 8, 1, 5, 8, 9, 2, 7))
    options = {"learning_rate": 0.05, "wd": 0.01}
    net, _ = runs.run(k, optimizer, options, NETS[name], data)
    assert_as_one(net, runs.stock(optimizer, options, NETS[name], data))


def test_with_all_parameters_frozen_there_is_nothing_to_do():
    [param] = weights([[1.0, 2.0]], 2, grad_req="null")
    trainer = Trainer([param], "sgd")
    trainer.step(1)
    assert param.list_data()[1].asnumpy().tolist() == [1, 2]


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "nag"])
def test_float16_with_multi_precision_is_updated_in_float32(optimizer, options):
    """To the bit: sums of small integers are exact in float16 (MXNet has no float16 networks here).

    The steps are so small that without a float32 copy most of them would be lost.
    """
    options = {} if optimizer == "adam" else options
    options = {"learning_rate": 1e-4, "multi_precision": True, **options}
    rng = np.random.RandomState(0)
    start = [rng.normal(size=size) for size in (40, 7)]
    many, one = ([*weights(start, k, dtype="float16")] for k in (3, 1))
    mine = Trainer(many, optimizer, dict(options))
    theirs = gluon.Trainer(one, optimizer, dict(options), kvstore=None)
    for _ in range(20):
        grads = [rng.randint(-9, 10, (3, *param.shape)) for param in many]
        give_grads(many, grads)
        give_grads(one, [[grad.sum(axis=0)] for grad in grads])
        mine.step(4)
        theirs.step(4)
    for param, other, value in zip(many, one, start):
        want = other.data().asnumpy()
        assert (want != value.astype("float16")).mean() > 0.3
        for copy in param.list_data():
            assert copy.asnumpy().tobytes() == want.tobytes()
    states = [a for a in flatten(mine._updaters[0].states.values()) if a is not None]
    assert {np.dtype(state.dtype).name for state in states} == {"float32"}


def flatten(nest):
    for part in nest:
        yield from flatten(part) if isinstance(part, (tuple, list)) else [part]


MANY_WEIGHTS = """
import gluonpar, mxnet as mx

for optimizer in ("sgd", "lars"):
    net = mx.gluon.nn.Sequential()
    for _ in range(100):
        net.add(mx.gluon.nn.Dense(2, in_units=2))
    net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    options = {"learning_rate": 0.5, "momentum": 0.9}
    trainer = gluonpar.Trainer(net.collect_params(), optimizer, options)
    with mx.autograd.record():
        losses = [sum(p.data(c).sum() for p in trainer._params) for c in (mx.cpu(0), mx.cpu(1))]
    mx.autograd.backward(losses)
    trainer.step(1)
    arrays = [param.data(mx.cpu(1)).asnumpy() for param in trainer._params]
    print(optimizer, {float(value) for array in arrays for value in array.ravel()})
"""


def test_any_number_of_weights_may_be_updated_together():
    """MXNet's operators on several weights write beyond their memory if there are more than 60."""
    few, many = (
        run_python(MANY_WEIGHTS, MXNET_OPTIMIZER_AGGREGATION_SIZE=number, MALLOC_PERTURB_="165")
        for number in ("4", "200")
    )
    assert many == few and many.count("{") == 2


@pytest.mark.cpu("the kernels of GPUs need no such channels")
def test_the_first_step_names_convolutions_whose_channels_are_no_multiples_of_8(caplog):
    """LeNet-5's 6 and 16 channels, and beside them some that vector kernels take."""
    net = nn.HybridSequential()
    for inputs, outputs in ((3, 8), (8, 16), (16, 6), (6, 16)):
        net.add(nn.Conv2D(outputs, 3, in_channels=inputs))
    net.add(nn.Dense(3, in_units=16 * 4 * 4))
    net.initialize(ctx=device())
    trainer = Trainer(net.collect_params(), "sgd")
    with caplog.at_level("INFO", "gluonpar"):
        for _ in range(2):
            with mx.autograd.record():
                loss = net(mx.nd.ones((1, 3, 12, 12), ctx=device()))
            loss.backward()
            trainer.step(1)
    [line] = [record.getMessage() for record in caplog.records]
    named = [layer.weight.name in line for layer in net]
    assert named == [False, False, True, True, False]
    assert "16 to 6" in line and "6 to 16" in line
