"""All layers of gluon.nn, gluon.rnn and gluon.contrib: how the operator sweep trains them."""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
import operator_table
from mxnet.gluon import contrib, nn, rnn
from operator_table import BIG, C, Case, P

MODULES = {
    "nn": nn,
    "rnn": rnn,
    "contrib.nn": contrib.nn,
    "contrib.rnn": contrib.rnn,
    "contrib.cnn": contrib.cnn,
}
RECIPES: dict[str, list[Case]] = {}
FORMS = (*operator_table.ALL_FORMS, "deferred")  # the Trainer is made before shapes are known


def layer(name: str, make: Callable | None = None, *inputs: Any, **options: Any) -> None:
    """Add a case for a class, made by ``make``, or by the class with the other ``options``."""
    fields = {key: options.pop(key) for key in Case._fields[2:] if key in options}
    module, _, of_class = name.rpartition(".")
    make = make or (lambda: getattr(MODULES[module], of_class)(**options))
    forms = fields.pop("forms", FORMS)
    RECIPES.setdefault(name, []).append(Case([*inputs], options, layer=make, forms=forms, **fields))


BLOCK = ("imperative",)  # a Block that cannot be hybridized
layer("nn.Dense", None, P((4, 6)), units=5, activation="tanh")
layer("nn.Dense", None, P((4, 3, 32)), units=64, flatten=False, use_bias=False)
layer("nn.Activation", None, P((3, 5)), activation="relu")
layer("nn.LeakyReLU", None, P((3, 5)), alpha=0.1)
for name in "PReLU ELU SELU GELU Swish Flatten".split():
    layer(f"nn.{name}", None, P((3, 4, 5)))
layer("nn.Dropout", None, P((6, 7)), rate=0.5)
for name in "BatchNorm BatchNormReLU InstanceNorm LayerNorm GroupNorm".split():
    layer(f"nn.{name}", None, P((4, 3, 5, 5)))
    layer(f"nn.{name}", None, P((4, 16, 6, 6)))
layer("nn.BatchNorm", None, P((6, 5)), scale=False, center=False)
layer("nn.BatchNorm", None, P((6, 5)), use_global_stats=True)
layer("nn.BatchNorm", None, P((4, 5, 6, 3)), axis=3)
layer("nn.Embedding", None, C([[1, 3], [3, 0]]), input_dim=7, output_dim=4)
layer("nn.Embedding", None, C([[1, 3], [3, 0]]), input_dim=7, output_dim=4, sparse_grad=True,
      grad_reqs=("write",))  # fmt: skip
layer("nn.ReflectionPad2D", None, P((2, 3, 4, 4)), padding=1)
layer("nn.Lambda", None, P((3, 5)), function="tanh", forms=BLOCK)
layer("nn.HybridLambda", None, P((3, 5)), function="tanh")


def stacked(kind):
    net = kind()
    net.add(nn.Dense(8, "relu"), nn.Dense(3))
    return net


layer("nn.Sequential", lambda: stacked(nn.Sequential), P((4, 6)), forms=BLOCK)
layer("nn.HybridSequential", lambda: stacked(nn.HybridSequential), P((4, 6)))


def symbol_block():
    data = mx.sym.var("data")
    graph = mx.sym.FullyConnected(data, num_hidden=3, name="b")
    return nn.SymbolBlock(graph, data)


layer("nn.SymbolBlock", symbol_block, P((4, 6)), forms=BLOCK)
for dimensions in (1, 2, 3):
    width = [8, 8, 6][dimensions - 1]
    small, large = (P((2, c, *[width] * dimensions)) for c in (3, 16))
    for name in (f"nn.Conv{dimensions}D", f"nn.Conv{dimensions}DTranspose"):
        layer(name, None, small, channels=4, kernel_size=3)
        layer(name, None, large, channels=32, kernel_size=3, strides=2, padding=1, use_bias=False)
        layer(name, None, large, channels=16, kernel_size=4, groups=2, activation="relu",
              in_channels=16)  # fmt: skip
    for kind in "MaxPool", "AvgPool", "GlobalMaxPool", "GlobalAvgPool":
        layer(f"nn.{kind}{dimensions}D", None, small)
        layer(f"nn.{kind}{dimensions}D", None, large)
for kind, c_in, c_out in (("RNN", 3, 4), ("LSTM", 3, 4), ("GRU", 3, 4), ("LSTM", 16, 32)):
    layer(f"rnn.{kind}", None, P((5, 2, c_in)), hidden_size=c_out)
    layer(f"rnn.{kind}", None, P((5, 2, c_in)), hidden_size=c_out, num_layers=2, bidirectional=True)


def unrolled(cell, x):
    cell.reset()
    return cell.unroll(3, x, layout="TNC", merge_outputs=True)[0]


def cell(name: str, make: Callable, shape: tuple = (3, 2, 4), forms: tuple = FORMS) -> None:
    layer(name, make, P(shape), call=unrolled, forms=forms)


for kind in "RNNCell LSTMCell GRUCell".split():
    cell(f"rnn.{kind}", lambda kind=kind: getattr(rnn, kind)(4))


def stack_of_cells(kind):
    net = kind()
    net.add(rnn.LSTMCell(4))
    net.add(rnn.GRUCell(3))
    return net


cell("rnn.SequentialRNNCell", lambda: stack_of_cells(rnn.SequentialRNNCell), forms=BLOCK)
cell("rnn.HybridSequentialRNNCell", lambda: stack_of_cells(rnn.HybridSequentialRNNCell))
cell("rnn.DropoutCell", lambda: rnn.DropoutCell(0.5))
# Deferred, its weights would be drawn from the generator of one device, before the masks.
cell("rnn.ZoneoutCell", lambda: rnn.ZoneoutCell(rnn.LSTMCell(4), 0.3, 0.3),
     forms=operator_table.ALL_FORMS)  # fmt: skip
cell("rnn.ResidualCell", lambda: rnn.ResidualCell(rnn.GRUCell(4)))
cell("rnn.BidirectionalCell", lambda: rnn.BidirectionalCell(rnn.LSTMCell(4), rnn.LSTMCell(4)))


def concurrent(kind):
    net = kind()
    net.add(nn.Dense(3), contrib.nn.Identity())
    return net


layer("contrib.nn.Concurrent", lambda: concurrent(contrib.nn.Concurrent), P((4, 6)), forms=BLOCK)
layer("contrib.nn.HybridConcurrent", lambda: concurrent(contrib.nn.HybridConcurrent), P((4, 6)))
layer("contrib.nn.Identity", None, P((3, 5)))
layer("contrib.nn.PixelShuffle1D", None, P((2, 8, 3)), factor=2)
layer("contrib.nn.PixelShuffle2D", None, P((2, 12, 3, 5)), factor=(2, 3))
layer("contrib.nn.PixelShuffle3D", None, P((1, 48, 2, 3, 4)), factor=(2, 3, 4))
layer("contrib.nn.SyncBatchNorm", None, P(BIG), num_devices=1, devices=(1,))
for dimensions in (1, 2, 3):
    for kind in "RNN LSTM GRU".split():
        name = f"Conv{dimensions}D{kind}Cell"
        shape = (3, *[6] * dimensions)
        cell(f"contrib.rnn.{name}", lambda name=name, shape=shape: getattr(contrib.rnn, name)(
            shape, 4, 3, 3, 1), (3, 2, *shape))  # fmt: skip
cell("contrib.rnn.LSTMPCell", lambda: contrib.rnn.LSTMPCell(5, 3))
cell("contrib.rnn.VariationalDropoutCell",
     lambda: contrib.rnn.VariationalDropoutCell(rnn.LSTMCell(4), 0.3, 0.3, 0.3),
     forms=operator_table.ALL_FORMS)  # fmt: skip
layer("contrib.cnn.DeformableConvolution", None, P((2, 3, 6, 6)), channels=4, kernel_size=(3, 3))
