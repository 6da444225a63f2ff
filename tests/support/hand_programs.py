"""Parameters without Gluon: the events of any_program.py that train them by hand."""

import itertools

import mxnet as mx
import numpy as np

import gluonpar
from tests.support.batch_passes import Shard, call, differentiate

LR = 0.05


def hand_losses(X, params, heads):
    body, *of_heads = (param.as_nd_ndarray() for param in params)
    hidden = mx.nd.dot(X, body).tanh()
    return sum(((mx.nd.dot(hidden, of_heads[i]) - 1) ** 2).sum(axis=1) for i in heads)


HEADS = {"all": (0, 1), "a": (0,), "b": (1,)}


class Hand:
    """Parameters without Gluon: copies that ``get_params`` made, and arrays with grad_req='add'."""

    def __init__(self, ctx, start=None):
        self.ctx, rng = ctx, np.random.RandomState(0)
        shapes = (3, 5), (5, 2), (5, 1)
        start = start or [[mx.nd.array(rng.normal(0, 0.5, s)) for s in shapes] for _ in range(2)]
        self.copies = self.copies_of(start[0])
        self.adding = [[value.copyto(c) for value in start[1]] for c in ctx]
        for value in itertools.chain.from_iterable(self.adding):
            value.attach_grad("add")

    def copies_of(self, start):
        return [gluonpar.get_params(start, c) for c in self.ctx]

    def moved(self, ctx):
        return type(self)(ctx, [self.copies[0], self.adding[0]])

    def values(self):
        """By parameter, its values on all devices."""
        both = [*zip(*self.copies), *zip(*self.adding)]
        return [[value.asnumpy() for value in on_devices] for on_devices in both]

    def shards(self, X, params, order):
        """The shards of a batch, with the devices' copies of the parameters."""
        made = []
        for part, copies in zip(gluonpar.split_and_load(X, order) if len(X) else (), params):
            losses = {
                name: lambda x, p=copies, heads=heads: hand_losses(x, p, heads)
                for name, heads in HEADS.items()
            }
            made.append(Shard(part, losses, [*copies]))
        return made

    def differentiate(self, X, params, heads, way, order):
        """Run forward and backward on all devices, in the order ``order``."""
        params = [params[self.ctx.index(c)] for c in order]
        shards = self.shards(X, params, order)
        if isinstance(way, tuple):
            call(shards, way, order)
        else:
            differentiate(lambda shard: shard.losses[heads](shard.X), shards, way)

    def train_batch(self, X, n, heads, order):
        def model(X, params):
            return hand_losses(X, params, HEADS[heads])

        params = [self.copies[self.ctx.index(c)] for c in order]
        y = np.zeros(len(X), "float32")
        gluonpar.train_batch(X, y, params, order, LR, model, lambda out, y: out, batch_size=n)

    def update(self, n):
        gluonpar.allreduce_grads(self.copies)
        for params in self.copies:
            gluonpar.sgd(params, LR, n)

    def sum_added(self):
        gluonpar.allreduce_grads(self.adding)

    def update_added(self, n):
        for params in self.adding:
            gluonpar.sgd(params, LR, n)
            for param in params:
                param.grad[:] = 0


class HandAlone(Hand):
    """What is compared with: MXNet alone."""

    def copies_of(self, start):
        copies = [value.copyto(self.ctx[0]) for value in start]
        for value in copies:
            value.attach_grad()
        return [copies]

    def train_batch(self, X, n, heads, order):
        for param in self.copies[0]:
            param._fresh_grad = False
        self.differentiate(X, self.copies, heads, "one backward", order)
        self.update(n)

    def update(self, n):
        for param in self.copies[0]:
            if param._fresh_grad:
                param[:] -= LR / n * param.grad
            param._fresh_grad = False

    def sum_added(self):
        pass
