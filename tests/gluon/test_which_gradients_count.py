"""Only the gradients of a step's own backward count, whatever other backward passes there were.

A device without samples keeps the gradient of some earlier pass: of another network's loss, of a
batch that was skipped. One device, with MXNet's own Trainer, is what all are compared with.
"""

from concurrent.futures import ThreadPoolExecutor

import gluon_runs as runs
import mxnet as mx
import numpy as np
import pytest
from gluon_runs import STATIC, assert_as_one, contexts
from mxnet import autograd, gluon
from mxnet.gluon import nn

from gluonpar import run_tasks, split_and_load
from gluonpar.gluon.trainer import Trainer
from gluonpar.runtime import backward_passes, memory

SIZES = (8, 1, 8, 2, 1)


class StockWithKVStore(gluon.Trainer):
    """gluon.Trainer on kvstore='gluonpar'."""

    def __init__(self, *args):
        super().__init__(*args, kvstore="gluonpar")

    def step(self, batch_size):
        super().step(batch_size, ignore_stale_grad=batch_size % 2 == 0)  # it makes no difference


TRAINERS = {
    "host": Trainer,
    "adam": lambda params, _, options: Trainer(params, "adam", options),
    "ring": lambda *args: Trainer(*args, algorithm="ring"),
    "kvstore": StockWithKVStore,
}


def losses_of(loss, batch, ctx):
    with autograd.record():
        return [loss(x) for x in split_and_load(batch, ctx)]


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
        for x in split_and_load(batch, ctx):
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


def samples(sizes, seed=0):
    rng = np.random.RandomState(seed)
    return [rng.normal(size=(n, 4)).astype("float32") for n in sizes]


def gan(ctx, make, how):
    """The generator's backward also writes the critic's gradients, on all devices."""
    generator, critic = dense("generator_", ctx, 1, 4), dense("critic_", ctx, 2, 1)
    trainers = [
        make(n.collect_params(), "sgd", {"learning_rate": 0.1}) for n in (critic, generator)
    ]

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
    net = dense("net_", ctx, 1, 1)
    trainer = make(net.collect_params(), "sgd", {"learning_rate": 0.1})
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
    trainers = [make(part.collect_params(), "sgd", {"learning_rate": 0.1}) for part in parts]
    for i, batch in enumerate(samples((8, 8, 1, 2, 8, 1))):
        differentiate(lambda x: parts[1](parts[0](x)), batch, ctx, how)
        trainers[i % 2].step(len(batch))
    return parts


def overwritten(ctx, make, how):
    """Two losses per device in turn, of which the second overwrites the first's gradients."""
    net = dense("net_", ctx, 1, 1)
    trainer = make(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for batch in samples(SIZES):
        losses = losses_of(lambda x: (net(x) ** 2, net(x)), batch, ctx)
        for pair in losses if how == "one pass" else zip(*losses):
            for loss in pair:
                loss.backward(retain_graph=True)
        trainer.step(len(batch))
    return [net]


def reversed_devices(ctx, make, how):
    """A loop over devices from the last to the first, and a batch that is skipped."""
    net = dense("net_", ctx, 1, 1)
    trainer = make(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for i, batch in enumerate(samples((8, 7, 1, 1, 8, 2))):
        backward(losses_of(lambda x: net(x) ** 2, batch, ctx)[::-1], how)
        if i not in (0, 1, 3):
            trainer.step(len(batch))
    return [net]


def used_by_one_device(ctx, make, how):
    """A layer that only the last device used in a batch that is skipped, before a batch of one."""
    often, rarely = dense("often_", ctx, 1, 1), dense("rarely_", ctx, 2, 1)
    params = often.collect_params()
    params.update(rarely.collect_params())
    trainer = make(params, "sgd", {"learning_rate": 0.1})
    for batch in samples((8, 1, 8, 1)):
        shards = split_and_load(batch, ctx)
        with autograd.record():
            losses = [often(x) ** 2 for x in shards]
            losses[-1] = losses[-1] + rarely(shards[-1])
        backward(losses, how)
        if len(batch) == 1:
            trainer.step(1)
    return [often, rarely]


def made_late(ctx, make, how):
    """The Trainer is made after a batch that is not used."""
    net = dense("net_", ctx, 1, 1)
    for batch in samples((8, 1)):
        differentiate(lambda x: net(x) ** 2, batch, ctx, how)
    make(net.collect_params(), "sgd", {"learning_rate": 0.1}).step(1)
    return [net]


def adds(ctx, make, how):
    """grad_req='add' without zero_grad: all gradients there ever were count."""
    net = dense("net_", ctx, 1, 1)
    net.collect_params().setattr("grad_req", "add")
    trainer = make(net.collect_params(), "sgd", {"learning_rate": 0.01})
    for i, batch in enumerate(samples((8, 1, 8, 2))):
        differentiate(lambda x: net(x) ** 2, batch, ctx, how)
        if i == 2:
            trainer.allreduce_grads()
        else:
            trainer.step(len(batch))
    return [net]


def summed_before(ctx, make, how):
    """Sums that are summed again: at once, and after a batch that does not change all of them."""
    often, rarely = dense("often_", ctx, 1, 1), dense("rarely_", ctx, 2, 1)
    params = often.collect_params()
    params.update(rarely.collect_params())
    trainer = make(params, "sgd", {"learning_rate": 0.1})
    for i, batch in enumerate(samples((8, 6, 8, 1, 8))):
        differentiate(lambda x: often(x) ** 2 + rarely(x) ** 2, batch, ctx, how)
        trainer.allreduce_grads()
        if i % 2:
            differentiate(lambda x: often(x) ** 2, batch[:2], ctx, how)
        trainer.step(8)  # an even number: StockWithKVStore ignores stale gradients
    return [often, rarely]


def recorded_before(ctx, make, how):
    """Two batches, of 8 samples and of fewer, are recorded before either one's backward."""
    net = dense("net_", ctx, 1, 1)
    trainer = make(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for batches in zip(samples((8, 8)), samples((1, 2), seed=1)):
        for losses in [losses_of(lambda x: net(x) ** 2, batch, ctx) for batch in batches]:
            autograd.backward(losses)
        trainer.step(len(batches[1]))
    return [net]


def on_another_device(ctx, make, how):
    """Batches of one sample, on the first device and then on the last; a Trainer for each."""
    parts = [dense("first_", ctx, 1, 4), dense("second_", ctx, 2, 1)]
    trainers = [make(part.collect_params(), "sgd", {"learning_rate": 0.1}) for part in parts]
    for i, batch in enumerate(samples((1, 1, 1, 1, 8, 1))):
        differentiate(lambda x: parts[1](parts[0](x)), batch, ctx[::-1] if i % 2 else ctx, how)
        trainers[i % 2].step(len(batch))
    return parts


def adds_where_it_is_used(ctx, make, how):
    """grad_req='add', and a layer whose gradient keeps the sum while another one's is computed."""
    parts = [dense("often_", ctx, 1, 1), dense("rarely_", ctx, 2, 1)]
    trainers = [make(part.collect_params(), "sgd", {"learning_rate": 0.01}) for part in parts]
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
    trainers = [make(net.collect_params(), "sgd", {"learning_rate": 0.1}) for net in nets]
    for batch, of_other in zip(samples((8, 1, 8, 2)), samples((1, 8, 8, 2), seed=1)):
        for i, x in enumerate(split_and_load(batch, ctx)):
            with autograd.record():
                loss = nets[0](x) ** 2
            loss.backward()
            if i == 0:
                differentiate(lambda x: nets[1](x) ** 2, of_other, ctx, how)
                trainers[1].step(len(of_other))
        trainers[0].step(len(batch))
    return nets


PROGRAMS = [
    *(gan, skips, halves, overwritten, reversed_devices, used_by_one_device, made_late, adds),
    *(summed_before, recorded_before, on_another_device, adds_where_it_is_used),
    beside_another_network,
]


@pytest.mark.parametrize("how", ["one pass", "a pass each", "device by device"])
@pytest.mark.parametrize(
    ("trainer", "k"), [("host", 2), ("host", 3), ("adam", 2), ("ring", 3), ("kvstore", 3)]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_trains_as_one_device_does(program, k, trainer, how):
    def stock(params, _, options):
        return gluon.Trainer(params, "adam" if trainer == "adam" else "sgd", options, kvstore=None)

    wanted = program(contexts(1), stock, how)
    for net, want in zip(program(contexts(k), TRAINERS[trainer], how), wanted):
        assert_as_one(net, runs.values(want))


@pytest.mark.parametrize("program", [gan, skips, halves])
def test_mxnets_own_flags_would_be_seen(program, monkeypatch):
    """The bug, planted: every gradient counts that was written since the last update."""
    monkeypatch.setattr(
        backward_passes, "summands", lambda param: memory.grad_flags(param.list_data())
    )
    monkeypatch.setattr(backward_passes._Writes, "begin", lambda self: None)
    with pytest.raises(AssertionError):
        test_it_trains_as_one_device_does(program, 2, "host", "one pass")


@pytest.mark.parametrize("trainer", ["host", "kvstore"])
def test_another_thread_takes_a_step_between_the_passes_of_two_devices(trainer):
    """Of another network; before, it took one of this network."""

    def step(i, between=list):
        with autograd.record():
            first, second = (value * 2 for value in nets[i][0].list_data())
        first.backward()
        between()
        second.backward()
        trainers[i].step(1)
        return [value.asscalar() for value in nets[i][0].list_data()]

    nets = [runs.weights([[1.0]], 2) for _ in range(2)]
    trainers = [TRAINERS[trainer](params, "sgd", {"learning_rate": 1.0}) for params in nets]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(step, 0).result() == [-3.0, -3.0]
        assert step(0, lambda: thread.submit(step, 1).result()) == [-7.0, -7.0]
        assert step(1) == [-7.0, -7.0]


@pytest.mark.parametrize("how", ["a pass each", "device by device", "run_tasks"])
@pytest.mark.parametrize("trainer", ["host", "kvstore"])
def test_two_threads_train_two_networks_at_the_same_time(trainer, how):
    """By graphs that take longer than starting the threads."""

    def train(params):
        def loss(x):
            return sum(params[0].data(x.context) * x for _ in range(200))

        made = TRAINERS[trainer](params, "sgd", {"learning_rate": 1.0})
        batch, ctx = np.ones((2, 1), "float32"), contexts(2)
        for _ in range(9):
            if how == "run_tasks":
                with autograd.record():
                    losses = run_tasks(loss, split_and_load(batch, ctx), ctx)
                run_tasks(lambda one: one.backward(), losses, ctx)
            else:
                differentiate(loss, batch, ctx, how)
            made.step(400)
        return [value.asscalar() for value in params[0].list_data()]

    with ThreadPoolExecutor(2) as threads:
        trained = threads.map(train, [runs.weights([[1.0]], 2), runs.weights([[1.0]], 2)])
        assert [*trained] == [[-8.0, -8.0]] * 2


def test_skip_nonfinite_counts_the_batches_that_are_not_finite_only():
    """The last batch is good; the one before it left NaN on the device that has no sample now."""
    ctx = contexts(2)
    net = dense("net_", ctx, 1, 1)
    trainer = Trainer(net.collect_params(), "sgd", skip_nonfinite=True)
    for batch in ([[np.nan] * 4] * 4, [[1.0] * 4]):
        autograd.backward(losses_of(net, np.array(batch, "float32"), ctx))
    before = net.weight.list_data()[1].asnumpy()
    trainer.step(1)
    assert trainer.num_skipped == 0
    np.testing.assert_allclose(net.weight.list_data()[1].asnumpy(), before - 0.01, rtol=1e-5)
