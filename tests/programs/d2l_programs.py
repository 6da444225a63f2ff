"""Dive into Deep Learning: the training functions of the packages d2l and d2lzh."""

import contextlib

import d2lzh
import mxnet as mx
from d2l import mxnet as d2l  # switches NumPy's semantics on
from mxnet import gluon, init, np, npx
from mxnet.gluon import nn

npx.reset_np()


@contextlib.contextmanager
def _numpy():
    npx.set_np()
    try:
        yield
    finally:
        npx.reset_np()


def _uneven(X, y, devices):
    return tuple(gluon.utils.split_and_load(part, devices, even_split=False) for part in (X, y))


def resnet18(ctx, way):
    """d2l: ResNet-18 (13.6), by train_batch_ch13."""
    with _numpy():
        net = d2l.resnet18(10)
        net.initialize(init=init.Normal(sigma=0.01), ctx=ctx)
        trainer = way.trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
        for n in (8, 8, 7):
            X, y = np.random.normal(size=(n, 1, 14, 14)), np.arange(n) % 10
            loss, accuracy = d2l.train_batch_ch13(net, X, y, loss_of, trainer, ctx, _uneven)
            yield [np.array([loss, float(accuracy)])], list(net.collect_params().values())


class Inference(nn.Block):
    """Decomposable attention (Parikh et al., 2016), as the book builds it: attend, compare, sum."""

    def __init__(self, words, width=16):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.attend, self.compare, self.aggregate = (_mlp(width, flat) for flat in (0, 0, 1))
        self.out = nn.Dense(3)

    def forward(self, X):
        A, B = self.embedding(X[0]), self.embedding(X[1])
        e = npx.batch_dot(self.attend(A), self.attend(B), transpose_b=True)
        beta, alpha = npx.batch_dot(npx.softmax(e), B), npx.softmax(e.transpose(0, 2, 1))
        alpha = npx.batch_dot(alpha, A)
        compared = [self.compare(np.concatenate(pair, axis=2)) for pair in ((A, beta), (B, alpha))]
        sums = [one.sum(axis=1) for one in compared]
        return self.out(self.aggregate(np.concatenate(sums, axis=1)))


def _mlp(width, flatten):
    net = nn.Sequential()
    for _ in range(2):
        net.add(nn.Dropout(0.2), nn.Dense(width, activation="relu", flatten=bool(flatten)))
    return net


def inference(ctx, way):
    """d2l: inference by attention (16.5), by split_batch_multi_inputs."""
    words = 40
    with _numpy():
        net = Inference(words)
        net.initialize(init.Xavier(), ctx=ctx)
        trainer = way.trainer(net.collect_params(), "adam", {"learning_rate": 0.001})
        loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
        for n in (8, 8, 7):
            X = [np.random.randint(0, words, size=(n, 6)) for _ in range(2)]
            y = np.random.randint(0, 3, size=(n,))
            split = d2l.split_batch_multi_inputs
            loss, accuracy = d2l.train_batch_ch13(net, X, y, loss_of, trainer, ctx, split)
            yield [np.array([loss, float(accuracy)])], list(net.collect_params().values())


def d2lzh_train(ctx, way):
    """d2lzh: ResNet-18, by train of the first edition."""
    net = d2lzh.resnet18(10)
    net.initialize(init=init.Normal(sigma=0.01), ctx=ctx)
    trainer = way.trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    seen, loss_of = [], gluon.loss.SoftmaxCrossEntropyLoss()

    def recorded(y_hat, y):
        seen.append(loss_of(y_hat, y))
        return seen[-1]

    images = mx.nd.random.normal(shape=(20, 1, 14, 14))
    data = gluon.data.ArrayDataset(images, mx.nd.arange(20) % 10)
    for _ in range(2):
        train_iter = gluon.data.DataLoader(data, 8)
        d2lzh.train(train_iter, train_iter, net, recorded, trainer, ctx, 1)
        yield seen[-3 * len(ctx) :], list(net.collect_params().values())
