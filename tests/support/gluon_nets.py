"""Every kind of Gluon network that a Trainer may be given, with the sizes of gluon_runs."""

import functools

import gluon_runs as runs
import mxnet as mx
import numpy as np
from gluon_runs import STATIC
from mxnet import gluon
from mxnet.gluon import nn


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
    net.hybridize(**STATIC)
    return net


NETS = {
    "block": Plain,
    "symbol block": symbol_block,
    "hybridized": functools.partial(runs.mlp, hybridize={}),
    "static_alloc": functools.partial(runs.mlp, hybridize={"static_alloc": True}),
    "static": functools.partial(runs.mlp, hybridize=STATIC),
    "deferred hybridized": functools.partial(runs.mlp, deferred=True, hybridize={}),
    "deferred static": functools.partial(runs.mlp, deferred=True, hybridize=STATIC),
    "convolution": convolution,
}
