"""MXNet's own programs around a Trainer or a kvstore: Estimator, Module, BucketingModule."""

import logging

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib import estimator


def _data(n, features=8, classes=4):
    rng = np.random.RandomState(5)
    return rng.normal(size=(n, features)).astype("float32"), rng.randint(0, classes, n)


def fitted(ctx, way):
    """MXNet: Estimator."""
    net = nn.HybridSequential()
    net.add(nn.Dense(16, activation="relu"), nn.BatchNorm(), nn.Dense(4))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize()
    trainer = way.trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    X, y = _data(28)  # Estimator's batches cannot be split unevenly
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(X, y.astype("float32")), 8)
    logging.getLogger("Estimator").setLevel(logging.ERROR)
    program = estimator.Estimator(
        net,
        gluon.loss.SoftmaxCrossEntropyLoss(),
        mx.metric.Accuracy(),
        trainer=trainer,
        context=ctx,
    )
    program.logger.setLevel(logging.ERROR)
    for _ in range(2):
        program.fit(loader, epochs=1)
        loss = dict(metric.get() for metric in program.train_metrics)
        yield [mx.nd.array(list(loss.values()))], list(net.collect_params().values())


class _Values:
    """A Module's parameter, as Gluon's are read."""

    grad_req = "write"

    def __init__(self, name, arrays):
        self.name, self._arrays = name, arrays

    def list_data(self):
        return self._arrays


def _of(module):
    group = module._exec_group
    return [_Values(*both) for both in zip(group.param_names, group.param_arrays)]


def module(ctx, way):
    """MXNet: Module.fit."""
    data = mx.sym.var("data")
    hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=16), act_type="relu")
    out = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=4), name="softmax")
    X, y = _data(32)
    batches = mx.io.NDArrayIter(X, y, 8)
    one = mx.mod.Module(out, context=ctx)
    metric = mx.metric.CrossEntropy()
    options = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}
    for epoch in range(2):
        batches.reset()
        one.fit(
            batches, num_epoch=epoch + 1, begin_epoch=epoch, eval_metric=metric, optimizer="sgd",
            kvstore=way.kvstore, optimizer_params=options, initializer=mx.init.Xavier(),
        )  # fmt: skip
        yield [mx.nd.array([metric.get()[1]])], _of(one)


def bucketing_module(ctx, way):
    """MXNet: BucketingModule, an LSTM for three lengths."""
    words, hidden = 20, 8

    def network(length):
        data, label = mx.sym.var("data"), mx.sym.var("softmax_label")
        embedded = mx.sym.Embedding(data, input_dim=words, output_dim=hidden, name="embed")
        cell = mx.rnn.LSTMCell(hidden, prefix="lstm_")
        outputs, _ = cell.unroll(length, inputs=embedded, merge_outputs=True)
        scores = mx.sym.FullyConnected(
            mx.sym.reshape(outputs, shape=(-1, hidden)), num_hidden=words, name="scores"
        )
        flat = mx.sym.reshape(label, shape=(-1,))
        return mx.sym.SoftmaxOutput(scores, flat, name="softmax"), ("data",), ("softmax_label",)

    rng = np.random.RandomState(5)
    sentences = [list(rng.randint(0, words, n)) for n in (4, 6, 8) for _ in range(17)]
    batches = mx.rnn.BucketSentenceIter(sentences, 8, buckets=[4, 6, 8])
    one = mx.mod.BucketingModule(network, default_bucket_key=8, context=ctx)
    metric = mx.metric.Perplexity(None)
    for epoch in range(2):
        one.fit(
            batches, num_epoch=epoch + 1, begin_epoch=epoch, eval_metric=metric, optimizer="sgd",
            kvstore=way.kvstore, optimizer_params={"learning_rate": 0.1, "wd": 1e-4},
            initializer=mx.init.Xavier(),
        )  # fmt: skip
        yield [mx.nd.array([metric.get()[1]])], _of(one._curr_module)
