"""Training loops with batches that are left out, or have fewer samples than devices.

Each is a function of devices, of how to make a Trainer, and of how backward is called; it returns
the networks. In a job of several processes each rank trains on its part of every batch.
"""

from concurrent.futures import ThreadPoolExecutor

import gluon_runs as runs
import mxnet as mx
import numpy as np
from gluon_runs import STATIC, assert_as_one, contexts
from mxnet import autograd, gluon
from mxnet.gluon import nn

from gluonpar import cluster, split_and_load
from gluonpar.gluon.trainer import Trainer
from gluonpar.plans import partition

SIZES = (8, 1, 8, 2, 1)
is_alone = False  # whether a program runs that others are compared with


class StockWithKVStore(gluon.Trainer):
    """gluon.Trainer on kvstore='gluonpar'."""

    def __init__(self, *args):
        super().__init__(*args, kvstore="gluonpar")

    def step(self, batch_size):
        super().step(batch_size, ignore_stale_grad=batch_size % 2 == 0)  # it makes no difference


class OwnLoop(StockWithKVStore):
    """A loop of its own over the store, which gives it parameter by parameter."""

    def _allreduce_grads(self):
        for i, param in enumerate(self._params):
            if param.grad_req != "null":
                self._kvstore.pushpull(i, param.list_grad(), priority=-i)


HOWS = ("one pass", "a pass each", "device by device")
TRAINERS = {
    "host": Trainer,
    "adam": lambda params, _, options: Trainer(params, "adam", options),
    "ring": lambda *args: Trainer(*args, algorithm="ring"),
    "kvstore": StockWithKVStore,
    "own loop": OwnLoop,
}


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


# MXNet frees nothing of what it allocates for a thread, so there is one for all programs.
THREAD = ThreadPoolExecutor(1)


def on_another_thread(function, *arguments):
    return THREAD.submit(function, *arguments).result()


def samples(sizes, seed=0):
    """Batches with at least one sample for each rank: without, it cannot leave a batch out."""
    rng = np.random.RandomState(seed)
    return [rng.normal(size=(max(n, cluster.size()), 4)).astype("float32") for n in sizes]


def gan(ctx, make, how):
    """The generator's backward also writes the critic's gradients, on all devices."""
    generator, critic = dense("generator_", ctx, 1, 4), dense("critic_", ctx, 2, 1)
    trainers = [trainer_of([net], make) for net in (critic, generator)]

    def critics_loss(x):
        return critic(x) - critic(generator(x).detach())

    def generators_loss(x):
        return critic(generator(x))

    # The critic's batch is small after the generator's was large, and the other way round.
    for i, (small, large) in enumerate(zip(samples(SIZES), samples((8,) * 5, seed=1))):
        for trainer, batch in zip(trainers, (small, large) if i % 2 else (large, small)):
            loss = critics_loss if trainer is trainers[0] else generators_loss
            differentiate(loss, batch, ctx, how)
            trainer.step(len(batch))
    return [generator, critic]


def skips(ctx, make, how):
    """A loss that is NaN, an exception, a sum that is never used: each before a batch of one."""
    net, trainer = one_layer(ctx, make)
    for i, batch in enumerate(samples((8, 7, 1, 6, 1, 7, 1, 8, 2))):
        skipped = i in (1, 3, 5, 7)
        if skipped:
            batch[:] = [np.nan, np.inf, 100, 1e30][i // 2]
        differentiate(lambda x: net(x) ** 2, batch, ctx, how)
        if i == 5:
            trainer.allreduce_grads()
        if not skipped:
            trainer.step(len(batch))
    return [net]


def halves(ctx, make, how):
    """Two Trainers for the two parts of one network, stepped in turns."""
    parts = [dense("first_", ctx, 1, 4), dense("second_", ctx, 2, 1)]
    trainers = [trainer_of([part], make) for part in parts]
    for i, batch in enumerate(samples((8, 8, 1, 2, 8, 1))):
        differentiate(lambda x: parts[1](parts[0](x)), batch, ctx, how)
        trainers[i % 2].step(len(batch))
    return parts


def overwritten(ctx, make, how):
    """Two losses per device in turn, of which the second overwrites the first's gradients."""
    net, trainer = one_layer(ctx, make)
    for batch in samples(SIZES):
        losses = losses_of(lambda x: (net(x) ** 2, net(x)), batch, ctx)
        for pair in losses if how == "one pass" else zip(*losses):
            for loss in pair:
                loss.backward(retain_graph=True)
        trainer.step(len(batch))
    return [net]


def reversed_devices(ctx, make, how):
    """A loop over devices from the last to the first, and a batch that is skipped."""
    net, trainer = one_layer(ctx, make)
    for i, batch in enumerate(samples((8, 7, 1, 1, 8, 2))):
        backward(losses_of(lambda x: net(x) ** 2, batch, ctx)[::-1], how)
        if i not in (0, 1, 3):
            trainer.step(len(batch))
    return [net]


def used_by_one_device(ctx, make, how):
    """A layer that only the last device used in a batch that is skipped, before a batch of one."""
    (often, rarely), trainer = two_layers(ctx, make)
    for number, batch in enumerate(samples((8, 1, 8, 1))):
        shards = shards_of(batch, ctx)
        with autograd.record():
            losses = [often(x) ** 2 for x in shards]
            losses[-1] = losses[-1] + rarely(shards[-1])
        backward(losses, how)
        if number % 2:
            trainer.step(len(batch))
    return [often, rarely]


def made_late(ctx, make, how):
    """The Trainer is made after a batch that is not used."""
    net = dense("net_", ctx, 1, 1)
    for batch in samples((8, 1)):
        differentiate(lambda x: net(x) ** 2, batch, ctx, how)
    trainer_of([net], make).step(1)
    return [net]


def adds(ctx, make, how):
    """grad_req='add' without zero_grad: all gradients there ever were count."""
    net = dense("net_", ctx, 1, 1)
    net.collect_params().setattr("grad_req", "add")
    trainer = trainer_of([net], make, 0.01)
    for i, batch in enumerate(samples((8, 1, 8, 2))):
        differentiate(lambda x: net(x) ** 2, batch, ctx, how)
        if i == 2:
            trainer.allreduce_grads()
        else:
            trainer.step(len(batch))
    return [net]


def summed_before(ctx, make, how):
    """Sums that are summed again: at once, and after a batch that does not change all of them."""
    (often, rarely), trainer = two_layers(ctx, make)
    for i, batch in enumerate(samples((8, 6, 8, 1, 8))):
        differentiate(lambda x: often(x) ** 2 + rarely(x) ** 2, batch, ctx, how)
        trainer.allreduce_grads()
        if i % 2:
            differentiate(lambda x: often(x) ** 2, batch[:2], ctx, how)
        trainer.step(8)  # an even number: StockWithKVStore ignores stale gradients
    return [often, rarely]


def recorded_before(ctx, make, how):
    """Two batches, of 8 samples and of fewer, are recorded before either one's backward."""
    net, trainer = one_layer(ctx, make)
    for batches in zip(samples((8, 8)), samples((1, 2), seed=1)):
        for losses in [losses_of(lambda x: net(x) ** 2, batch, ctx) for batch in batches]:
            autograd.backward(losses)
        trainer.step(len(batches[1]))
    return [net]


def on_another_device(ctx, make, how):
    """Batches of one sample, on the first device and then on the last; a Trainer for each."""
    parts = [dense("first_", ctx, 1, 4), dense("second_", ctx, 2, 1)]
    trainers = [trainer_of([part], make) for part in parts]
    for i, batch in enumerate(samples((1, 1, 1, 1, 8, 1))):
        differentiate(lambda x: parts[1](parts[0](x)), batch, ctx[::-1] if i % 2 else ctx, how)
        trainers[i % 2].step(len(batch))
    return parts


def adds_where_it_is_used(ctx, make, how):
    """grad_req='add', and a layer whose gradient keeps the sum while another one's is computed."""
    parts = [dense("often_", ctx, 1, 1), dense("rarely_", ctx, 2, 1)]
    trainers = [trainer_of([part], make, 0.01) for part in parts]
    for part in parts:
        part.collect_params().setattr("grad_req", "add")
    for batch in samples((8, 1, 8)):
        differentiate(lambda x: parts[0](x) ** 2 + parts[1](x) ** 2, batch, ctx, how)
        trainers[1].allreduce_grads()
        differentiate(lambda x: parts[0](x) ** 2, batch, ctx, how)
        trainers[1].update(8)
        trainers[0].step(8)
    return parts


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


def recorded_between(ctx, make, how):
    """Two losses per device from one recording; something else is recorded between backwards."""
    body, a, b = nets = [dense(name, ctx, i, 4) for i, name in enumerate(("body_", "a_", "b_"))]
    trainer = trainer_of(nets, make)

    def record():
        with autograd.record():
            a.weight.data(ctx[0]) * 2

    for i, batch in enumerate(samples(SIZES)):
        for first, second in losses_of(lambda x: (a(body(x)), b(body(x)) * 3), batch, ctx):
            first.backward(retain_graph=True)
            record()
            second.backward()
            if i % 2:
                on_another_thread(record)
        trainer.step(len(batch))
    return nets


def last_device_first(ctx, make, how):
    """A record per device, the last device first, and batches that are left out."""
    net, trainer = one_layer(ctx, make)
    for i, batch in enumerate(samples((8, 1, 8, 7, 1, 2))):
        for x in shards_of(batch, ctx)[::-1]:
            with autograd.record():
                loss = net(x) ** 2
            loss.backward()
        if i not in (0, 3):
            trainer.step(len(batch))
    return [net]


def evaluated_while_recorded(ctx, make, how):
    """Between the devices' losses; the last device's backward comes first."""
    net, trainer = one_layer(ctx, make)
    for i, batch in enumerate(samples((1, 8, 1, 7))):
        losses = []
        with autograd.record():
            for x in shards_of(batch, ctx):
                losses.append(net(x) ** 2)
                with autograd.pause():
                    net(x)
        backward(losses[::-1], how)
        if i % 2:
            trainer.step(len(batch))
    return [net]


def used_by_some_samples(ctx, make, how):
    """A layer that the last device used in a batch that is left out, with a record per device."""
    (often, rarely), trainer = two_layers(ctx, make)
    for number, batch in enumerate(samples((8, 1, 8, 1))):
        shards = shards_of(batch, ctx)
        for i, x in enumerate(shards):
            with autograd.record():
                loss = often(x) ** 2
                if i == len(shards) - 1:
                    loss = loss + rarely(x)
            loss.backward()
        if number % 2:
            trainer.step(len(batch))
    return [often, rarely]


def on_two_threads(ctx, make, how):
    """Of which one has not run the network before, when sums of the other one are not used."""
    net, trainer = one_layer(ctx, make)
    for i, batch in enumerate(samples((8, 8, 1, 8, 2))):
        run = on_another_thread if i % 2 else lambda function, *batch: function(*batch)
        run(differentiate, lambda x: net(x) ** 2, batch, ctx, how)
        if i in (0, 3):
            trainer.allreduce_grads()
        else:
            trainer.step(len(batch))
    return [net]


def recorded_by_another_thread(ctx, make, how):
    """This thread calls backward, also of what it has recorded itself; some are left out."""
    net, trainer = one_layer(ctx, make)
    for i, batch in enumerate(samples((8, 1, 8, 1))):
        run = on_another_thread if i in (1, 2) else lambda function, *batch: function(*batch)
        backward(run(losses_of, lambda x: net(x) ** 2, batch, ctx), how)
        if i % 2:
            trainer.step(len(batch))
    return [net]


def gan_of_ranks(ctx, make, how):
    """The critic steps on every batch, the generator after two; a loop from the last device."""
    nets = generator, critic = dense("generator_", ctx, 1, 4), dense("critic_", ctx, 2, 1)
    of_generator, of_critic = [trainer_of([net], make, 0.01) for net in nets]

    def differentiate(loss, n):
        for each in losses_of(loss, samples((n,), seed=n)[0], ctx)[::-1]:
            each.backward()

    def both(x):
        return critic(generator(x))

    for first, second in ((4, 3), (2, 3), (3, 4)):
        differentiate(both, first)
        of_critic.step(first)
        differentiate(both, second)
        of_generator.step(second)
    differentiate(both, 2)
    differentiate(critic, 2)
    of_critic.step(2)
    differentiate(both, 3)
    of_critic.step(3)
    of_generator.step(3)
    return nets


def two_networks(ctx, make, how):
    """Under one Trainer; one of them had a batch of fewer devices."""
    nets, trainer = two_layers(ctx, make)
    for of_first, of_second in zip(samples((8, 1, 8, 2)), samples((1, 8, 2, 8), seed=1)):
        differentiate(lambda x: nets[0](x) ** 2, of_first, ctx, how)
        differentiate(lambda x: nets[1](x) ** 2, of_second, ctx, how)
        trainer.step(8)
    return nets


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


PROGRAMS = [
    *(gan, skips, halves, overwritten, reversed_devices, used_by_one_device, made_late, adds),
    *(summed_before, recorded_before, on_another_device, adds_where_it_is_used),
    *(beside_another_network, recorded_between, last_device_first, evaluated_while_recorded),
    *(used_by_some_samples, on_two_threads, recorded_by_another_thread, gan_of_ranks),
    *(two_networks, recorded_together, beside_added, renamed),
]


def check(program, k, trainer, how):
    """Check that K devices, of each rank, train as one device by MXNet's own Trainer."""

    def stock(params, _, options):
        return gluon.Trainer(params, "adam" if trainer == "adam" else "sgd", options, kvstore=None)

    global is_alone
    is_alone = True
    try:
        wanted = program(contexts(1), stock, how)
    finally:
        is_alone = False
    for net, want in zip(program(contexts(k), TRAINERS[trainer], how), wanted):
        assert_as_one(net, runs.values(want))
