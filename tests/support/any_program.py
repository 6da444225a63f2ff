"""Programs that nobody wrote: whatever is done between steps, all devices train as one.

Each event of a drawn program is done by MXNet's own Trainer on one device, on a network that is
never hybridized, and on K devices of each rank by gluonpar's, or by a loop of one's own over the
kvstore 'gluonpar'. There may be two Trainers, each of some parameters, of which every backward also
writes the other's; and there is a second network, which one of them trains, too. Parameters without
Gluon are trained by hand, and beside all this MXNet's own Trainer trains a network of its own.

A program ends where its batches cannot be told apart (:class:`batch_passes.CannotBeTold`).
"""

import contextlib
import functools
import itertools
import json
import math
import pathlib
import tempfile
from typing import NamedTuple

import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluonpar
from gluonpar import cluster
from gluonpar.plans import partition
from tests.support import beside
from tests.support import contexts as devices
from tests.support.batch_passes import (
    CALLS,
    PASSES,
    WAYS,
    Batch,
    CannotBeTold,
    Shard,
    batch_of,
    call,
    on_another_thread,
)
from tests.support.contexts import contexts
from tests.support.gluon_runs import STATIC, assert_as_one, stock_trainer
from tests.support.hand_programs import HEADS, LR, Hand, HandAlone

NUM_WORDS = 4
# What else is done in a batch: between passes, while it is recorded, or to all of it.
ALSO = (
    *("", "recorded by this thread", "recorded by another thread"),
    *("evaluated", "fetched before", "on another thread", "recorded on another thread"),
)
MODES = ({"active": False}, {}, {"static_alloc": True}, STATIC)
HOW = ("step", "clip_and_step", "clip", "halve")
USES = ("train", "train_recorded", "step", "use", "sum_by_hand", "accumulate", "by_hand")
BY_HAND = ("left out", "allreduce_grads", "train_batch")


def samples(n, seed):
    X = np.random.RandomState(seed).normal(size=(n, 3)).astype("float32")
    return X, np.arange(n) % NUM_WORDS


def values_of(param, seed):
    return mx.nd.array(np.random.RandomState(seed).normal(0, 0.5, param.shape))


class Net(gluon.HybridBlock):
    """Two heads on one body: a batch may use one head or both, in graphs of their own."""

    def __init__(self, sparse):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.table = nn.Embedding(NUM_WORDS, 5, sparse_grad=sparse)
            self.body = nn.Dense(5, activation="tanh", in_units=3)
            self.a = nn.Dense(2, in_units=5)
            self.b = nn.Dense(2, in_units=5, use_bias=False)

    def hybrid_forward(self, F, X, words):
        hidden = self.body(X) + self.table(words)
        return self.a(hidden), self.b(hidden)


class OneHead(gluon.HybridBlock):
    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def hybrid_forward(self, F, X):
        return self.head(self.body(X))


class Evens(gluon.Block):
    """One head for all samples, the other for every second one, which some devices may not have."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = a, b

    def forward(self, X, words):
        even = np.flatnonzero(words.asnumpy() % 2 == 0)
        chosen = mx.nd.array(even, ctx=X.context)
        return self.a(X), self.b(mx.nd.take(X, chosen)) if len(even) else None


def losses_of(model, X, words):
    if isinstance(model, Evens):
        a, b = model(X, words)
        return (a**2).sum(axis=1) + (0 if b is None else ((b - 1) ** 2).sum() / len(X))
    if isinstance(model, Net):
        a, b = model(X, words)
        return (a**2).sum(axis=1) + (b * 3 - 1).abs().sum(axis=1)
    return ((model(X) - 1) ** 2).sum(axis=1)


class Side:
    """Two networks, their one or two trainers, and the events of a program, on some devices."""

    make_hand = Hand

    def __init__(self, make_trainer, k, sparse, two):
        self.make_trainer, self.ctx = make_trainer, contexts(k)
        self.net, self.other = Net(sparse), nn.Dense(2, in_units=3, prefix="other_")
        self.params = [*self.collect_params().values()]
        for param in self.params:
            param.initialize(mx.init.Constant(values_of(param, 0)), self.ctx)
        heads = [OneHead(self.net.body, head) for head in (self.net.a, self.net.b)]
        self.models = [self.net, *heads, self.other, Evens(*heads)]
        params = self.params
        self.parts = [params[:-1], params[-1:]] if two else [params]
        self.trainers = [*map(make_trainer, self.parts)]
        self.stale = []  # whether gradients are missing in each step of an event
        # By network, until it is used: the last batch of each rank, and its params.
        self.unused = {}
        self.by_hands = self.make_hand(self.ctx)

    def collect_params(self):
        params = self.other.collect_params()
        params.update(self.net.collect_params())
        return params

    def mine(self, n):
        """The samples of a batch of n that this rank has."""
        return partition.slices(n, cluster.size())[cluster.rank()]

    def in_order(self, order):
        return [*itertools.permutations(self.ctx)][order % math.factorial(len(self.ctx))]

    def shards(self, n, model, seed, order=0):
        """The shards of a batch, unless it trains nothing."""
        batch = tuple(part[self.mine(n)] for part in samples(n, seed))
        if not len(batch[1]) or not self.trained(model):
            return []
        return gluonpar.split_and_load(batch, self.in_order(order))

    def trained(self, model):
        if isinstance(model, Evens):  # a shard may have nothing for the other head
            model = model.a
        return [param for param in model.collect_params().values() if param.grad_req != "null"]

    def check_told(self, network, n, way, order, params, also=""):
        """Raise CannotBeTold if a rank goes on with a batch that was left out."""
        # Of Evens some devices' passes do not overwrite what earlier ones have written.
        if network == "evens" and (way[0] == "three passes" or "net" in self.unused):
            raise CannotBeTold
        network = network.replace("evens", "net")
        ctx, parts = self.in_order(order), partition.slices(n, cluster.size())
        thread = "another" if also == "on another thread" else "the program's"
        of_ranks = [batch_of(way, ctx[: part.stop - part.start], thread) for part in parts]
        nothing = [Batch([], True)] * len(parts), set()
        for before, now in zip(self.unused.get(network, nothing)[0], of_ranks):
            CannotBeTold.check(before, now, self.ctx[0])
        self.unused[network] = of_ranks, params

    def check_model(self, n, model, way, order, also=""):
        trained = {self.params.index(param) for param in self.trained(self.models[model])}
        if trained:
            network = "other" if model == 3 else "evens" if model == 4 else "net"
            self.check_told(network, n, way, order, trained, also)

    def record(self, n, model, seed, order=0, also=""):
        weights = {}
        if also == "fetched before" and model != 3:
            self.hybridize({"active": False})  # MXNet's static graphs lose one of two gradients
            weights = {c: self.net.body.weight.data(c) for c in self.ctx}
        with autograd.record():
            shards, losses = self.shards(n, self.models[model], seed, order), []
            for shard in shards:
                if also == "evaluated":
                    self.evaluate(shard[0].context)
                losses.append(losses_of(self.models[model], *shard))
                if weights:
                    losses[-1] = losses[-1] + (weights[shard[0].context] ** 2).sum()
                if also == "evaluated":
                    self.evaluate(shard[0].context)
        return losses

    def evaluate(self, ctx):
        """A forward of which there is no backward."""
        for param in self.params[-2:]:
            (param.data(ctx) * 2).sum()
        with autograd.pause():
            self.params[-1].data(ctx) * 2
        with autograd.record():
            self.params[-1].data(ctx) * 2

    def record_something_else(self, ctx):
        with autograd.record():
            self.evaluate(ctx)

    def between(self, also, ctx):
        if also == "recorded by this thread":
            self.record_something_else(ctx)
        elif also == "recorded by another thread":
            on_another_thread(self.record_something_else, ctx)

    def backward(self, n, model, way, seed, order=0, also=""):
        if also == "on another thread":
            on_another_thread(self.backward, n, model, way, seed, order)
            return
        way = "a loop" if way[0] == "retry" and self.adds() else way
        shards = self.shards(n, self.models[model], seed, order)
        self.check_model(n, model, way, order, also)
        if isinstance(way, tuple):
            made = [self.shard(X, words, model) for X, words in shards]
            call(made, self.way(way), self.in_order(order))
            return
        if way == "a loop":
            for X, words in shards:
                with autograd.record():
                    losses = losses_of(self.models[model], X, words)
                    if also == "evaluated":
                        self.evaluate(X.context)
                self.between(also, X.context)
                losses.backward()
            return
        if also == "recorded on another thread":
            losses = on_another_thread(self.record, n, model, seed, order)
        else:
            losses = self.record(n, model, seed, order, also)
        if losses and way == "one backward":
            autograd.backward(losses)
            return
        for each in losses[::-1] if way == "the last device first" else losses:
            each.backward()
            self.between(also, each.context)

    def adds(self):
        return any(param.grad_req == "add" for param in self.params)

    def way(self, way):
        return way

    def shard(self, X, words, model):
        heads = {"all": model, **({"a": 3, "b": 3} if model == 3 else {"a": 1, "b": 2})}
        losses = {
            name: lambda x, m=self.models[i]: losses_of(m, x, words) if self.trained(m) else None
            for name, i in heads.items()
        }
        trained = self.trained(self.models[model])
        return Shard(X, losses, [param.data(X.context) for param in trained])

    def by_hand(self, t, *batch):
        """A step on all parameters of both networks without a Trainer."""
        self.backward(*batch)
        trained = [param for param in self.params if param.grad_req != "null"]
        device_params = [[param.data(c) for param in trained] for c in self.ctx]
        gluonpar.allreduce_grads(device_params[::-1] if t else device_params)
        for values in device_params:
            for value in values:
                value[:] = value - LR / batch[0] * value.grad.tostype("default")

    def hand(self, what, n, heads, way, seed, order):
        """A batch on the parameters without Gluon."""
        X, ctx = samples(n, seed)[0][self.mine(n)], self.in_order(order)
        if what == "train_batch":
            self.by_hands.train_batch(X, n, heads, ctx)
        else:
            self.check_told("hand", n, way, order, {"hand"})
            self.by_hands.differentiate(X, self.by_hands.copies, heads, self.way(way), ctx)
        if what == "allreduce_grads":
            self.by_hands.update(n)
        if what != "left out":
            self.unused.pop("hand", None)

    def hand_adds(self, micro_batches):
        """A step on gradients that are summed after each micro-batch, and added up."""
        hand = self.by_hands
        for n, heads, way, seed, order in micro_batches:
            way = "a loop" if way[0] == "retry" else way
            X, ctx = samples(n, seed)[0][self.mine(n)], self.in_order(order)
            hand.differentiate(X, hand.adding, heads, self.way(way), ctx)
            hand.sum_added()
        hand.update_added(sum(n for n, *_ in micro_batches))

    def two_losses(self, t, n, how, recordings, seed, order):
        """A step on two losses per device, of which the later one overwrites gradients."""
        self.hybridize({"active": False})  # MXNet's static graphs that share a layer lose gradients
        for param in self.params:
            param.grad_req = param.grad_req.replace("null", "write")
        self.check_model(n, 1, how if how in WAYS else "a loop of backward", order)
        if recordings == 2:
            of_losses = [self.record(n, model, seed, order) for model in (1, 2)]
        else:
            with autograd.record():
                of_losses = [self.record(n, model, seed, order) for model in (1, 2)]
        if how == "one backward" and of_losses[0]:
            autograd.backward(sum(of_losses, []))
        else:
            passes = of_losses if how == "loss by loss" else zip(*of_losses)
            for loss in itertools.chain.from_iterable(passes):
                loss.backward()
        self.step(t, n)

    def step(self, t, n):
        """Refused, unless stale gradients are ignored, where one device with MXNet's would be."""
        is_stale = self.stale.pop(0)
        if is_stale and isinstance(self.trainers[t], gluonpar.Trainer):
            with pytest.raises(UserWarning):  # MXNet's leaves gradients out of the next step then
                self.trainers[t].step(n)
        self.trainers[t].step(n, ignore_stale_grad=is_stale)

    def train(self, t, *batch):
        self.backward(*batch)
        self.step(t, batch[0])

    def train_recorded(self, t, first, second, together=False):
        """A step on two batches, both recorded before backward of either, or in one recording."""
        self.hybridize({"active": False})  # MXNet's static graphs have room for one of them
        for param in self.params:  # the second backward would fail on a frozen one
            param.grad_req = param.grad_req.replace("null", "write")
        with autograd.record() if together else contextlib.nullcontext():
            recorded = [(batch, self.record(*batch)) for batch in (first, second)]
        for (n, model, _), losses in recorded:
            self.check_model(n, model, "one backward", 0)
            if losses:
                autograd.backward(losses)
        self.step(t, second[0])

    def sum(self, t):
        self.trainers[t].allreduce_grads()

    def finish(self, t, how, n):
        """A step on the gradients that there are, in one of the ways HOW."""
        if how in ("clip", "halve"):
            self.sum(t)
        if how.startswith("clip"):
            self.clip_norm(t, 0.5)
        if how == "halve":
            trained = [param for param in self.parts[t] if param.grad_req != "null"]
            for grad in itertools.chain.from_iterable(param.list_grad() for param in trained):
                grad[:] *= 0.5
        if how in ("clip", "halve"):
            self.trainers[t].update(n, ignore_stale_grad=True)
        else:
            self.step(t, n)

    def use(self, t, how, *batch):
        self.backward(*batch)
        self.finish(t, how, batch[0])

    def clip_norm(self, t, max_norm):
        self.trainers[t].clip_global_norm(max_norm)

    def sum_by_hand(self, t, *batch):
        """A step on gradients that the program has summed over devices and ranks."""
        self.zero_grad(t)
        self.backward(*batch)
        trained = [param for param in self.parts[t] if param.grad_req != "null"]
        gluonpar.allreduce_many([param.list_grad() for param in trained])
        self.trainers[t].update(batch[0], ignore_stale_grad=True)

    def accumulate(self, t, how, *micro_batches):
        with self.trainers[t].no_sync():
            for batch in micro_batches:
                self.backward(*batch)
        self.finish(t, how, sum(batch[0] for batch in micro_batches))

    def require(self, layer, grad_req):
        """Freeze a layer, or train it again."""
        block = (self.net.body, self.net.table, self.net.a, self.net.b)[layer]
        block.collect_params().setattr("grad_req", grad_req)

    def set_data(self, i, seed):
        self.params[i].set_data(values_of(self.params[i], seed))

    def zero_grad(self, t):
        for param in self.parts[t]:
            param.zero_grad()

    def set_learning_rate(self, t, lr):
        self.trainers[t].set_learning_rate(lr)

    def hybridize(self, mode):
        for model in self.models:
            model.hybridize(**mode)

    def resume(self, t):
        with tempfile.TemporaryDirectory() as folder:
            path, lr = str(pathlib.Path(folder) / "states"), self.trainers[t].learning_rate
            self.trainers[t].save_states(path)
            self.trainers[t] = self.make_trainer(self.parts[t])
            self.trainers[t].load_states(path)
            self.trainers[t].set_learning_rate(lr)

    def remake(self, t):
        """Train on with a Trainer that has not seen what has been done so far."""
        self.trainers[t] = self.make_trainer(self.parts[t])

    def renew(self, how):
        """Give the parameters other arrays, of the same values, or their arrays other gradients."""
        self.hybridize({"active": False})
        if how == "attach_grad":
            for value in itertools.chain.from_iterable(param.list_data() for param in self.params):
                value.attach_grad()
        elif how == "cast":
            self.net.cast("float32")
        else:
            self.collect_params().reset_ctx(self.ctx)
        self.unused = {}

    def move(self, k, reverse):
        self.ctx = contexts(k)[:: -1 if reverse else 1]
        self.collect_params().reset_ctx(self.ctx)
        self.by_hands = self.by_hands.moved(self.ctx)
        self.unused = {}


class Unlike(Side):
    """A rank of which nothing is known that the others would do: any step may have no gradients."""

    def check_told(self, *batch):
        pass

    def step(self, t, n):
        self.trainers[t].step(n, ignore_stale_grad=True)


class Alone(Side):
    """What is compared with: MXNet alone, on one device."""

    make_hand = HandAlone

    def mine(self, n):
        return slice(n)

    def check_told(self, *batch):
        pass

    def way(self, way):
        return (way[0], "a loop", 0) if isinstance(way, tuple) else way

    def step(self, t, n):
        trained = [param for param in self.parts[t] if param.grad_req != "null"]
        self.stale.append(not all(param.data()._fresh_grad for param in trained))
        self.trainers[t].step(n, ignore_stale_grad=True)

    def fresh(self):
        """The numbers of the parameters that have gradients that have not been used."""
        trained = [(i, p) for i, p in enumerate(self.params) if p.grad_req != "null"]
        return {i for i, param in trained if param.data()._fresh_grad}

    def hybridize(self, mode):
        pass

    def clip_norm(self, t, max_norm):
        trained = [param for param in self.parts[t] if param.grad_req != "null"]
        new = [param.grad() for param in trained if param.data()._fresh_grad]
        if new:
            gluon.utils.clip_global_norm(new, max_norm)

    def sum_by_hand(self, t, *batch):
        self.zero_grad(t)
        self.backward(*batch)
        self.trainers[t].step(batch[0], ignore_stale_grad=True)

    def by_hand(self, t, *batch):
        self.backward(*batch)
        for param in self.params:
            adds = param.grad_req == "add"
            if param.grad_req != "null" and (adds or param.data()._fresh_grad):
                value = param.data()
                value[:] = value - LR / batch[0] * value.grad.tostype("default")
                value._fresh_grad = adds and value._fresh_grad

    def accumulate(self, t, how, *micro_batches):
        """Not by grad_req='add', with which MXNet writes some gradients all the same."""
        trained = [param for param in self.parts[t] if param.grad_req != "null"]
        sums = {}
        for batch in micro_batches:
            for param in trained:
                param.data()._fresh_grad = False
                param.zero_grad()
            self.backward(*batch)
            for param in (param for param in trained if param.data()._fresh_grad):
                sums[param] = param.grad() + sums.get(param, 0)
        for param in trained:
            param.data()._fresh_grad = param in sums
        for param, total in sums.items():
            param.grad()[:] = total
        self.finish(t, how, sum(batch[0] for batch in micro_batches))

    def renew(self, how):
        if how != "attach_grad":  # MXNet's Trainer would go on with the gradients from before
            super().renew(how)

    def move(self, k, reverse):
        super().move(1, False)


def event(name, *arguments):
    return st.tuples(st.just(name), st.tuples(*arguments))


class Expected(NamedTuple):
    """What MXNet alone has after an event."""

    values: list
    by_hands: list
    stale: list  # whether gradients were missing, of each step
    fresh: tuple  # the numbers of parameters with gradients that are not used, before and after


def expected(optimizer, sparse, program, two):
    """Do the events of a program with MXNet alone, and yield what it has after each."""
    options = OPTIMIZERS[optimizer]
    side = Alone(lambda params: stock_trainer(params, optimizer, dict(options)), 1, sparse, two)
    for name, arguments in program:
        if name == "beside":
            yield None
            continue
        before, side.stale = side.fresh(), []
        getattr(side, name)(*arguments)
        values = [param.data().asnumpy() for param in side.params]
        yield Expected(values, side.by_hands.values(), side.stale, (before, side.fresh()))


def check(kvstore, optimizer, sparse, k, program, two=False, kvstore_beside=None, want=None):
    """Check that all devices train as one, and return how many events could be told."""
    got = Side(trainers_of(kvstore, optimizer), k, sparse, two)
    with_beside = any(name == "beside" for name, _ in program)
    of_mxnet, seen, number = with_beside and beside.Network(kvstore_beside), [], 0
    for (name, arguments), one in zip(program, want or expected(optimizer, sparse, program, two)):
        if name == "beside":
            seen.append(of_mxnet.do(*arguments))
            number += 1
            continue
        unused, got.stale = {**got.unused}, [*one.stale]
        try:
            getattr(got, name)(*arguments)
        except CannotBeTold:
            break
        if name in USES:
            before, after = one.fresh
            for key, (batches, params) in [*got.unused.items()]:
                written = before if unused.get(key, [()])[0] is batches else params
                if (written & params) - after - {"hand"}:
                    del got.unused[key]
        assert_as_one(got, one.values, 1e-4)
        for (value,), (first, *others) in zip(one.by_hands, got.by_hands.values()):
            np.testing.assert_allclose(first, value, 1e-4, 1e-5)
            for other in others:
                assert other.tobytes() == first.tobytes()
        number += 1
    if seen:
        alone = [arguments for name, arguments in program if name == "beside"][: len(seen)]
        assert json.loads(json.dumps(seen)) == beside.of_another_process(kvstore_beside, alone)
    return number


def check_unlike(kvstore, optimizer, k, program, two, rank, place, change):
    """One rank leaves an event out, does it later, or does another one before.

    Then all ranks get an error, at the latest in the next step of each Trainer, or none, and their
    parameters have the same bits.
    """
    mine = [*program]
    if cluster.rank() == rank:
        place %= len(mine)
        if change == "left out":
            del mine[place]
        elif change == "later":
            mine.insert(place + 1, mine.pop(place))
        else:
            mine.insert(place, change)
    side, failure, bits = Unlike(trainers_of(kvstore, optimizer), k, False, two), "", b""
    try:
        for name, arguments in mine:
            getattr(side, name)(*arguments)
            mx.nd.waitall()
        for t in range(len(side.trainers)):
            side.train(t, 8, 0, "one backward", 0)
        bits = b"".join(param.data().asnumpy().tobytes() for param in side.params)
        cluster.gather("the end of a program")
    except (mx.MXNetError, ValueError, RuntimeError) as error:
        failure = str(error)
    try:
        cluster.gather(None)  # also compares what updates used before or after the error
    except ValueError as error:
        failure += str(error)
    of_ranks = cluster.gather((failure, bits))
    if not all(failure for failure, _ in of_ranks):
        failures = [failure[-300:] for failure, _ in of_ranks]
        assert len({*of_ranks}) == 1, (k, program, two, rank, place, change, failures)


class OwnLoop(gluon.Trainer):
    """gluon.Trainer on kvstore='gluonpar', whose gradients the program gives it one by one."""

    def __init__(self, *args):
        super().__init__(*args, kvstore="gluonpar")

    def _allreduce_grads(self):
        for i, param in enumerate(self._params):
            if param.grad_req == "null":
                continue
            grads = param.list_grad()
            if grads[0].stype == "default":
                self._kvstore.pushpull(i, grads, priority=-i)
            else:
                self._kvstore.push(i, grads, priority=-i)
                self._kvstore.pull(i, grads, priority=-i)


TRAINERS = {
    None: gluonpar.Trainer,
    "ring": lambda *args: gluonpar.Trainer(*args, algorithm="ring"),
    "own loop": OwnLoop,
}


def trainers_of(kvstore, optimizer):
    return lambda params: TRAINERS[kvstore](params, optimizer, dict(OPTIMIZERS[optimizer]))


OPTIMIZERS = {
    "sgd": {"learning_rate": 0.05},
    "nag": {"learning_rate": 0.05, "momentum": 0.9},
    # By a smaller epsilon, a sum that is nearly zero is divided by one that is: by its rounding.
    "adam": {"learning_rate": 0.05, "epsilon": 1e-3},
}
SOME = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)  # of three devices
HALF = st.lists(st.integers(0, 1), min_size=1, max_size=2, unique=True)  # of two parameters
NETS = st.integers(0, 2)  # models that are, or are parts of, one network
BESIDE = (
    *[(st.just("backward"), st.tuples(SOME, HALF, st.integers(1, 2), st.booleans()))] * 2,
    (st.just("share"), st.tuples(SOME, HALF)),
    (st.just("step"), st.tuples(st.booleans())),
    (st.just("sum"), st.just(())),
    (st.just("require"), st.tuples(st.integers(0, 1), st.sampled_from(("null", "write", "add")))),
)
EVERY = [*itertools.product((None, "own loop"), OPTIMIZERS, (False, True))]


def named(way, least_samples=1):
    """Programs of a common shape, by name, of which each batch is differentiated in one way."""

    def size(n):
        return max(n, least_samples)

    def left_out(n, model=0, order=0, also=""):
        return "backward", (size(n), model, way, n, order, also)

    def train(n, t=0, **how):
        return "train", (t, *left_out(n, **how)[1])

    def by_hand(n, reverse=0, order=0):
        return "by_hand", (reverse, *left_out(n, order=order)[1])

    def copies(what, n, heads="all"):
        return "hand", (what, size(n), heads, way, n, 0)

    def recorded(*batches, together=False):
        models = (0, 3) if together else (0, 0)
        made = [(size(n), model, n) for n, model in zip(batches, models)]
        return "train_recorded", (0, *made, together)

    def beside_added(n):
        """A step uses what passes added, and leaves what they wrote; then devices come reversed."""
        return [("zero_grad", (-1,)), train(n, -1), train(8, order=5)]

    def renewed(how):
        return [("renew", (how,)), left_out(8), train(1)]

    step, sums, adds = ("step", (0, 8)), ("sum", (0,)), ("require", (0, "add"))
    added = ("hand_adds", ([(size(n), "all", way, n, 0) for n in (4, 2)],))
    thread, evaluated = {"also": "on another thread"}, {"also": "evaluated"}
    there = {"also": "recorded on another thread"}
    frozen = [("require", (0, request)) for request in ("null", "write")]
    b_adds = ("require", (3, "add"))
    sizes = ((8, 0), (1, -1), (1, 0), (8, -1), (8, 0), (2, -1))
    return {
        "gan": [train(n, t) for n, t in sizes],
        "halves": [train(n, -(i % 2)) for i, n in enumerate((8, 8, 1, 2, 8, 1))],
        "skips": [left_out(8), left_out(7), train(1), left_out(7), sums, train(1), train(8)],
        "a head each": [train(8, model=1), left_out(8, 2), train(1, model=1), train(8)],
        "another order": [train(8, order=5), train(1), train(1, order=5), train(7)],
        "other devices": [train(1, -(i % 2), order=i % 2) for i in range(4)],
        "adds": [adds, train(8), train(1), left_out(8), sums, train(2)],
        "sums": [left_out(8), sums, left_out(2, 1), step, left_out(8), sums, sums, step],
        "recorded before": [recorded(8, 1), recorded(8, 2), recorded(1, 8)],
        "two networks": [left_out(8), train(1, model=3), left_out(1), train(8, model=3), train(2)],
        "threads": [left_out(8, **thread), train(1, **thread), train(8), train(1, **thread)],
        "evaluated": [train(1, **evaluated), left_out(8, **evaluated), train(1, **evaluated)],
        "recorded on another thread": [
            left_out(8),
            train(1, **there),
            left_out(8, **there),
            train(1),
        ],
        "recorded together": [recorded(n, 8, together=True) for n in (1, 2, 8)],
        "made late": [left_out(8), left_out(1), ("remake", (0,)), step],
        "renewed": [*renewed("reset_ctx"), *renewed("cast"), *renewed("attach_grad")],
        "frozen for a while": [train(8), *frozen, left_out(8), train(1)],
        "beside added": [b_adds, *beside_added(1), *beside_added(2)],
        "copies by hand": [
            *(copies("left out", 8), copies("allreduce_grads", 1), copies("left out", 7)),
            *(copies("train_batch", 1, "a"), copies("allreduce_grads", 1, "a")),
        ],
        "added by hand": [added, added],
        "a network by hand": [by_hand(5), by_hand(5, 1, order=5), left_out(8), by_hand(1)],
    }


NAMED = [*named("")]


@functools.lru_cache(None)
def expected_of_named(name, way, least_samples):
    """Return a program, whether it has two Trainers, and what is expected after each event."""
    program = named(way, least_samples)[name]
    two = any(arguments[0] == -1 for _, arguments in program)
    return program, two, [*expected("sgd", False, program, two)]


def check_named(name, kvstore, k, way):
    program, two, want = expected_of_named(name, way, cluster.size())  # each rank has a sample
    number = check(kvstore, "sgd", False, k, program, two, want=want)
    assert number == len(program), "it cannot be told"


def law(kvstore, optimizer, sparse, num_programs, least_samples=1, unlike=False):
    """That :func:`check` holds, as a function; ranks without samples can skip no batch.

    Or, if they are ``unlike``, :func:`check_unlike`.
    """
    sizes = [n for n in (1, 2, 3, 4, 7, 8) if n >= least_samples]
    size, number = st.sampled_from(sizes), st.integers(0, 99)
    order = st.one_of(st.just(0), st.integers(0, 23))
    several = st.tuples(st.sampled_from([*PASSES]), st.sampled_from(CALLS), number)
    way = st.one_of(st.sampled_from(WAYS), several)
    model = st.integers(0, 4 if cluster.size() == 1 else 3)  # ranks with other heads are refused
    batch = size, model, way, number, order, st.sampled_from(ALSO)
    single = size, st.integers(0, 3), st.sampled_from(WAYS), number, order, st.sampled_from(ALSO)
    hand = size, st.sampled_from([*HEADS]), way, number, order
    hows = st.sampled_from(("one backward", "loss by loss", "device by device"))
    trainer, how = st.sampled_from((0, -1)), st.sampled_from(HOW)
    may_skip, dense = least_samples >= cluster.size(), not sparse
    requests = ("null", "write") if sparse else ("null", "write", "add")
    events = [
        *[event("train", trainer, *batch) for _ in range(4)],  # the same object would count once
        event("step", trainer, size),
        event("sum", trainer),
        event("require", st.integers(0, 3), st.sampled_from(requests)),
        event("set_data", st.integers(0, 6), st.integers(0, 99)),
        event("set_learning_rate", trainer, st.sampled_from((0.01, 0.1))),
        event("hybridize", st.sampled_from(MODES)),
        event("by_hand", st.integers(0, 1), *batch),
        *[event("hand", st.sampled_from(BY_HAND[not may_skip :]), *hand) for _ in range(2)],
        event("hand_adds", st.lists(st.tuples(*hand), min_size=1, max_size=3)),
    ]
    if devices.kind is mx.cpu and not unlike:
        events += [event("beside", *each) for each in BESIDE]
    if may_skip:
        events.append(event("backward", *batch))  # and no step
        recorded, of_other = (st.tuples(size, models, number) for models in (NETS, st.just(3)))
        events.append(event("train_recorded", trainer, recorded, recorded, st.just(False)))
        events.append(event("train_recorded", trainer, recorded, of_other, st.just(True)))
        events.append(event("two_losses", trainer, size, hows, st.integers(1, 2), number, order))
    if cluster.size() == 1:
        events += [event("resume", trainer), event("remake", trainer)]
    if dense:  # MXNet has neither for row_sparse gradients
        events += [event("zero_grad", trainer), event("use", trainer, st.just("halve"), *batch)]
    if kvstore is None and cluster.size() == 1:
        events.append(event("move", st.integers(1, 4), st.booleans()))
    if kvstore is None and dense:
        events += [event("use", trainer, how, *batch) for _ in range(2)]
        events += [event("accumulate", trainer, how, *[st.tuples(*single)] * n) for n in (1, 2, 3)]
    if kvstore is None and dense and may_skip:
        events.append(event("sum_by_hand", trainer, *batch))

    # All ranks must draw the same programs, however long one takes, and shrinking takes minutes.
    # Another number of programs draws others.
    alike = {"database": None, "deadline": None, "phases": [Phase.generate]}
    drawn = settings(max_examples=num_programs, suppress_health_check=[*HealthCheck], **alike)
    two = st.booleans() if may_skip else st.just(False)  # a batch may have nothing for one of two
    if unlike:
        changes = st.sampled_from(("left out", "later")), st.one_of(events)
        rank, place = st.integers(0, cluster.size() - 1), st.integers(0, 11)
        programs = st.lists(st.one_of(events), min_size=4, max_size=12)

        @seeded(num_programs)
        @drawn
        @given(st.integers(1, 3), programs, two, rank, place, st.one_of(*changes))
        def told(k, program, two, rank, place, change):
            check_unlike(kvstore, optimizer, k, program, two, rank, place, change)

        return told

    @seeded(num_programs)
    @drawn
    @given(
        st.integers(1, 4),
        st.lists(st.one_of(events), min_size=4, max_size=12),
        two,
        st.sampled_from(beside.KVSTORES),
    )
    def holds(k, program, two, kvstore_beside):
        check(kvstore, optimizer, sparse, k, program, two, kvstore_beside)

    return holds
