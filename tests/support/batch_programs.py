"""Training loops that are no lists of events of any_program.py: arrays or recordings are shared.

In a job of several processes each rank trains on its part of every batch.
"""

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from gluonpar import cluster, split_and_load
from gluonpar.plans import partition
from tests.support import gluon_runs as runs
from tests.support.any_program import TRAINERS
from tests.support.batch_passes import backward, differentiate, on_another_thread
from tests.support.gluon_runs import STATIC, assert_as_one, contexts

HOWS = ("one backward", "a loop of backward", "a loop")


class Layers:
    """Two layers on some devices of each rank, or on the one device that others are compared with.

    The batches are drawn: a program must draw the same numbers of samples in both cases.
    """

    def __init__(self, ctx, make_trainer, how, is_alone):
        self.ctx, self.make_trainer, self.how, self.is_alone = ctx, make_trainer, how, is_alone
        self.rng = np.random.RandomState(0)
        self.nets = [self.dense(prefix) for prefix in ("first_", "second_")]

    def dense(self, prefix):
        net = nn.Dense(1, in_units=4, prefix=prefix)
        net.initialize(ctx=self.ctx)
        for param in net.collect_params().values():
            param.set_data(mx.nd.array(self.rng.normal(0, 0.5, param.shape)))
        if len(self.ctx) == 3:  # a static graph keeps writing to the arrays that it found first
            net.hybridize(**STATIC)
        return net

    def trainer(self, *nets):
        params = gluon.ParameterDict()
        for net in nets:
            params.update(net.collect_params())
        return self.make_trainer(params, "sgd", {"learning_rate": 0.1})

    def shards(self, n):
        """Draw a batch. A rank without samples could not leave it out, so each has one."""
        n = max(n, cluster.size())
        batch = self.rng.normal(size=(n, 4)).astype("float32")
        part = partition.slices(n, cluster.size())[cluster.rank()]
        return split_and_load(batch if self.is_alone else batch[part], self.ctx)

    def losses(self, net, n):
        return [net(x) ** 2 for x in self.shards(n)]

    def differentiate(self, net, n):
        differentiate(lambda x: net(x) ** 2, self.shards(n), self.how)


def made_late(layers):
    """The Trainer is made after a batch that is not used."""
    net, _ = layers.nets
    for n in (8, 1):
        layers.differentiate(net, n)
    layers.trainer(net).step(1)


def beside_another_network(layers):
    """Which makes a step between two devices' passes for one batch."""
    net, other = layers.nets
    trainer, trainer_of_other = (layers.trainer(each) for each in layers.nets)
    for n, of_other in ((8, 1), (1, 8), (8, 8), (2, 2)):
        first, *rest = layers.shards(n)
        differentiate(lambda x: net(x) ** 2, [first], "a loop")
        layers.differentiate(other, of_other)
        trainer_of_other.step(of_other)
        differentiate(lambda x: net(x) ** 2, rest, "a loop")
        trainer.step(n)


def recorded_by_another_thread(layers):
    """This thread calls backward, also of what it has recorded itself; some are left out."""
    net, _ = layers.nets
    trainer = layers.trainer(net)

    def record(n):
        with autograd.record():
            return layers.losses(net, n)

    for n, is_here, is_left_out in ((8, 1, 1), (1, 0, 0), (8, 0, 1), (1, 1, 0)):
        backward(record(n) if is_here else on_another_thread(record, n), layers.how)
        if not is_left_out:
            trainer.step(n)


def recorded_together(layers):
    """Batches of two networks in one recording, of which the first is for fewer devices."""
    trainer = layers.trainer(*layers.nets)
    for n in (1, 2, 8):
        with autograd.record():
            losses = [layers.losses(net, size) for net, size in zip(layers.nets, (n, 8))]
        for each in losses:
            backward(each, layers.how)
        trainer.step(8)


def beside_added(layers):
    """A step uses gradients that passes add to, and leaves those that they wrote beside them."""
    adding, writing = layers.nets
    adding.collect_params().setattr("grad_req", "add")
    for net in layers.nets:
        net.hybridize(False)
    of_adding, of_writing = (layers.trainer(net) for net in layers.nets)

    def loss(x):
        return adding(x) * writing(x)

    for n in (1, 2):
        adding.collect_params().zero_grad()
        differentiate(loss, layers.shards(n), layers.how)
        of_adding.step(n)
        differentiate(loss, layers.shards(8)[::-1], "a loop")
        of_writing.step(8)


def renamed(layers):
    """Arrays or gradients are replaced, before a batch of 8 that is left out and one of 1."""
    net, _ = layers.nets
    trainer, params = layers.trainer(net), net.collect_params()

    def attach_again():
        """MXNet's Trainer would go on with the gradients from before."""
        for param in () if layers.is_alone else params.values():
            for value in param.list_data():
                value.attach_grad()

    changes = [
        lambda: params.reset_ctx(layers.ctx),
        lambda: params.setattr("grad_req", "null") or params.setattr("grad_req", "write"),
        lambda: net.cast("float32"),
        attach_again,
    ]
    net.hybridize(False)
    for change in changes:
        change()
        for n in (8, 1):
            layers.differentiate(net, n)
        trainer.step(1)


PROGRAMS = [made_late, beside_another_network, recorded_by_another_thread, recorded_together]
PROGRAMS += [beside_added, renamed]


def check(program, k, kvstore, how):
    """Check that K devices, of each rank, train as one device by MXNet's own Trainer."""
    want = Layers(contexts(1), runs.stock_trainer, how, is_alone=True)
    got = Layers(contexts(k), TRAINERS[kvstore], how, is_alone=False)
    for layers in (want, got):
        program(layers)
    for net, alone in zip(got.nets, want.nets):
        assert_as_one(net, runs.values(alone))
