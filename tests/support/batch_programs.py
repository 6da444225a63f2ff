"""Training loops that are no lists of events of any_program.py: arrays or recordings are shared.

Each is a function of devices, of how to make a Trainer, and of how backward is called; it returns
the networks. In a job of several processes each rank trains on its part of every batch.
"""

import gluon_runs as runs
import mxnet as mx
import numpy as np
from any_program import TRAINERS
from batch_passes import on_another_thread
from gluon_runs import STATIC, assert_as_one, contexts
from mxnet import autograd, gluon
from mxnet.gluon import nn

from gluonpar import cluster, split_and_load
from gluonpar.plans import partition

HOWS = ("one pass", "a pass each", "device by device")
is_alone = False  # whether a program runs that others are compared with


def shards_of(batch, ctx):
    """The shards of this rank's part, or of the whole batch where one device trains alone."""
    part = partition.slices(len(batch), cluster.size())[cluster.rank()]
    return split_and_load(batch if is_alone else batch[part], ctx)


def losses_of(loss, batch, ctx):
    with autograd.record():
        return [loss(x) for x in shards_of(batch, ctx)]


def backward(losses, how):
    """All devices in one pass, or in a pass each."""
    if how == "one pass":
        autograd.backward(losses)
    else:
        for loss in losses:
            loss.backward()


def differentiate(loss, batch, ctx, how):
    """Forward on all devices and then backward, or both device by device, as in the book's loop."""
    if how == "device by device":
        for x in shards_of(batch, ctx):
            with autograd.record():
                one = loss(x)
            one.backward()
    else:
        backward(losses_of(loss, batch, ctx), how)


def dense(prefix, ctx, seed, outputs):
    net = nn.Dense(outputs, in_units=4, prefix=prefix)
    net.initialize(ctx=ctx)
    rng = np.random.RandomState(seed)
    for param in net.collect_params().values():
        param.set_data(mx.nd.array(rng.normal(0, 0.5, param.shape)))
    if len(ctx) == 3:  # from a static graph, which keeps writing to the arrays that it found first
        net.hybridize(**STATIC)
    return net


def trainer_of(nets, make, lr=0.1):
    params = nets[0].collect_params()
    for net in nets[1:]:
        params.update(net.collect_params())
    return make(params, "sgd", {"learning_rate": lr})


def one_layer(ctx, make):
    net = dense("net_", ctx, 1, 1)
    return net, trainer_of([net], make)


def two_layers(ctx, make):
    nets = dense("often_", ctx, 1, 1), dense("rarely_", ctx, 2, 1)
    return nets, trainer_of(nets, make)


def samples(sizes, seed=0):
    """Batches with at least one sample for each rank: without, it cannot leave a batch out."""
    rng = np.random.RandomState(seed)
    return [rng.normal(size=(max(n, cluster.size()), 4)).astype("float32") for n in sizes]


def made_late(ctx, make, how):
    """The Trainer is made after a batch that is not used."""
    net = dense("net_", ctx, 1, 1)
    for batch in samples((8, 1)):
        differentiate(lambda x: net(x) ** 2, batch, ctx, how)
    trainer_of([net], make).step(1)
    return [net]


def beside_another_network(ctx, make, how):
    """Which makes a step between two devices' passes for one batch."""
    nets = [dense("first_", ctx, 1, 1), dense("second_", ctx, 2, 1)]
    trainers = [trainer_of([net], make) for net in nets]
    for batch, of_other in zip(samples((8, 1, 8, 2)), samples((1, 8, 8, 2), seed=1)):
        for i, x in enumerate(shards_of(batch, ctx)):
            with autograd.record():
                loss = nets[0](x) ** 2
            loss.backward()
            if i == 0:
                differentiate(lambda x: nets[1](x) ** 2, of_other, ctx, how)
                trainers[1].step(len(of_other))
        trainers[0].step(len(batch))
    return nets


def recorded_by_another_thread(ctx, make, how):
    """This thread calls backward, also of what it has recorded itself; some are left out."""
    net, trainer = one_layer(ctx, make)
    for i, batch in enumerate(samples((8, 1, 8, 1))):
        run = on_another_thread if i in (1, 2) else lambda function, *batch: function(*batch)
        backward(run(losses_of, lambda x: net(x) ** 2, batch, ctx), how)
        if i % 2:
            trainer.step(len(batch))
    return [net]


def recorded_together(ctx, make, how):
    """Batches of two networks in one recording, of which the first is for fewer devices."""
    nets, trainer = two_layers(ctx, make)
    for of_first, of_second in zip(samples((1, 2, 8)), samples((8, 8, 8), seed=1)):
        with autograd.record():
            firsts = [nets[0](x) ** 2 for x in shards_of(of_first, ctx)]
            seconds = [nets[1](x) ** 2 for x in shards_of(of_second, ctx)]
        backward(firsts, how)
        backward(seconds, how)
        trainer.step(8)
    return nets


def beside_added(ctx, make, how):
    """A step uses gradients that passes add to, and leaves those that they wrote beside them."""
    adding, writing = nets = dense("adding_", ctx, 1, 1), dense("writing_", ctx, 2, 1)
    adding.collect_params().setattr("grad_req", "add")
    of_adding, of_writing = [trainer_of([net], make) for net in nets]
    for first, second in zip(samples((1, 2)), samples((8, 8), seed=1)):
        for net in nets:
            net.hybridize(False)
        adding.collect_params().zero_grad()
        differentiate(lambda x: adding(x) * writing(x), first, ctx, how)
        of_adding.step(len(first))
        for x in shards_of(second, ctx)[::-1]:
            with autograd.record():
                loss = adding(x) * writing(x)
            loss.backward()
        of_writing.step(8)
    return nets


def renamed(ctx, make, how):
    """Arrays or gradients are replaced, before a batch of 8 that is left out and one of 1."""
    net, trainer = one_layer(ctx, make)
    params = net.collect_params()
    changes = [
        lambda: params.reset_ctx(ctx),
        lambda: params.setattr("grad_req", "null") or params.setattr("grad_req", "write"),
        lambda: net.cast("float32"),
        # MXNet's Trainer, on one device, would go on with the gradients from before.
        lambda: [v.attach_grad() for p in params.values() for v in p.list_data() if len(ctx) > 1],
    ]
    net.hybridize(False)
    for i, change in enumerate(changes):
        change()
        for batch in samples((8, 1), seed=i):
            differentiate(lambda x: net(x) ** 2, batch, ctx, how)
        trainer.step(1)
    return [net]


PROGRAMS = [made_late, beside_another_network, recorded_by_another_thread, recorded_together]
PROGRAMS += [beside_added, renamed]


def check(program, k, kvstore, how):
    """Check that K devices, of each rank, train as one device by MXNet's own Trainer."""

    def stock(params, _, options):
        return gluon.Trainer(params, "sgd", options, kvstore=None)

    global is_alone
    is_alone = True
    try:
        wanted = program(contexts(1), stock, how)
    finally:
        is_alone = False
    for net, want in zip(program(contexts(k), TRAINERS[kvstore], how), wanted):
        assert_as_one(net, runs.values(want))
