"""Programs that nobody wrote: whatever is done between steps, all devices train as one.

Each event of a drawn program is done by MXNet's own Trainer on one device, on a network that is
never hybridized, and on K devices of each rank by gluonpar's, or by MXNet's with
kvstore='gluonpar'. There may be two Trainers, each of some parameters, of which every backward also
writes the other's; and there is a second network, which one of them trains, too.

A program ends where its batches cannot be told apart: where a batch is left out, and the next one
begins, in a recording of its own, on devices that the first had no samples on.
"""

import itertools
import math
import pathlib
import tempfile

import mxnet as mx
import numpy as np
import pytest
from batch_programs import on_another_thread
from contexts import contexts
from gluon_runs import STATIC, assert_as_one, by_kvstore, stock_trainer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluonpar
from gluonpar import cluster
from gluonpar.plans import partition

NUM_WORDS = 4
WAYS = ("one backward", "a loop", "a loop of backward", "the last device first")
# What else is done in a batch: between passes, while it is recorded, or to all of it.
ALSO = (
    *("", "recorded by this thread", "recorded by another thread"),
    *("evaluated", "fetched before", "on another thread"),
)
MODES = ({"active": False}, {}, {"static_alloc": True}, STATIC)
CLIPS = ("clip", "clip_and_step")
USES = ("train", "train_recorded", "step", "halve", *CLIPS, "sum_by_hand", "accumulate")


class CannotBeTold(Exception):
    """Nobody can tell this batch from the one before, which was left out."""


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


def losses_of(model, X, words):
    if isinstance(model, Net):
        a, b = model(X, words)
        return (a**2).sum(axis=1) + (b * 3 - 1).abs().sum(axis=1)
    return ((model(X) - 1) ** 2).sum(axis=1)


class Side:
    """Two networks, their one or two trainers, and the events of a program, on some devices."""

    def __init__(self, make_trainer, k, sparse, two):
        self.make_trainer, self.ctx = make_trainer, contexts(k)
        self.net, self.other = Net(sparse), nn.Dense(2, in_units=3, prefix="other_")
        self.collect_params().initialize(ctx=self.ctx)
        heads = [OneHead(self.net.body, head) for head in (self.net.a, self.net.b)]
        self.models = [self.net, *heads, self.other]
        for i in range(len(self.params)):
            self.set_data(i, 0)
        params = self.params
        self.parts = [params[:-1], params[-1:]] if two else [params]
        self.trainers = [*map(make_trainer, self.parts)]
        self.stale = []  # whether gradients are missing in each step that comes
        # By network, until it is used: the devices on each rank of the last batch, and its params.
        self.unused = {}

    def collect_params(self):
        params = self.other.collect_params()
        params.update(self.net.collect_params())
        return params

    @property
    def params(self):
        return [*self.collect_params().values()]

    def mine(self, n):
        """The samples of a batch of n that this rank has."""
        return partition.slices(n, cluster.size())[cluster.rank()]

    def in_order(self, order):
        return [*itertools.permutations(self.ctx)][order % math.factorial(len(self.ctx))]

    def shards(self, n, model, seed, order=0):
        """The shards of a batch, unless it trains nothing."""
        rng, mine = np.random.RandomState(seed), self.mine(n)
        batch = rng.normal(size=(n, 3)).astype("float32")[mine], np.arange(n)[mine] % NUM_WORDS
        if not len(batch[1]) or not self.trained(model):
            return []
        return gluonpar.split_and_load(batch, self.in_order(order))

    def trained(self, model):
        return [param for param in model.collect_params().values() if param.grad_req != "null"]

    def check_told(self, n, model, a_record_each, order):
        """Raise CannotBeTold if a rank goes on with a batch that was left out."""
        ctx, network, trained = self.in_order(order), model == 3, self.trained(self.models[model])
        if not trained:
            return
        parts = partition.slices(n, cluster.size())
        of_ranks = [ctx[: min(len(ctx), part.stop - part.start)] for part in parts]
        for before, now in zip(self.unused.get(network, [()])[0], of_ranks):
            first = now[:1] if a_record_each else now
            if before and now and not {*before} & {*first}:
                raise CannotBeTold
        self.unused[network] = of_ranks, {self.params.index(param) for param in trained}

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
        shards = self.shards(n, self.models[model], seed, order)
        self.check_told(n, model, way == "a loop", order)
        if way == "a loop":
            for X, words in shards:
                with autograd.record():
                    losses = losses_of(self.models[model], X, words)
                    if also == "evaluated":
                        self.evaluate(X.context)
                self.between(also, X.context)
                losses.backward()
            return
        losses = self.record(n, model, seed, order, also)
        if losses and way == "one backward":
            autograd.backward(losses)
            return
        for each in losses[::-1] if way == "the last device first" else losses:
            each.backward()
            self.between(also, each.context)

    def two_losses(self, t, n, how, recordings, seed, order):
        """A step on two losses per device, of which the later one overwrites gradients."""
        self.hybridize({"active": False})  # MXNet's static graphs that share a layer lose gradients
        for param in self.params:
            param.grad_req = param.grad_req.replace("null", "write")
        self.check_told(n, 1, False, order)
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

    def train_recorded(self, t, first, second):
        """A step on two batches, both recorded before backward of either."""
        self.hybridize({"active": False})  # MXNet's static graphs have room for one of them
        for param in self.params:  # the second backward would fail on a frozen one
            param.grad_req = param.grad_req.replace("null", "write")
        recorded = [(batch, self.record(*batch)) for batch in (first, second)]
        for (n, model, _), losses in recorded:
            self.check_told(n, model, False, 0)
            if losses:
                autograd.backward(losses)
        self.step(t, second[0])

    def sum(self, t):
        self.trainers[t].allreduce_grads()

    def halve(self, t, *batch):
        """A step, of whose summed gradients half is used."""
        self.backward(*batch)
        self.sum(t)
        for grads in (param.list_grad() for param in self.parts[t] if param.grad_req != "null"):
            for grad in grads:
                grad[:] *= 0.5
        self.trainers[t].update(batch[0], ignore_stale_grad=True)

    def clip(self, t, *batch):
        self.backward(*batch)
        self.sum(t)
        self.clip_norm(t, 0.5)
        self.trainers[t].update(batch[0], ignore_stale_grad=True)

    def clip_and_step(self, t, *batch):
        self.backward(*batch)
        self.clip_norm(t, 0.5)
        self.step(t, batch[0])

    def clip_norm(self, t, max_norm):
        self.trainers[t].clip_global_norm(max_norm)

    def sum_by_hand(self, t, *batch):
        """A step on gradients that the program has summed over devices and ranks."""
        self.zero_grad(t)
        self.backward(*batch)
        trained = [param for param in self.parts[t] if param.grad_req != "null"]
        gluonpar.allreduce_many([param.list_grad() for param in trained])
        self.trainers[t].update(batch[0], ignore_stale_grad=True)

    def accumulate(self, t, *micro_batches):
        with self.trainers[t].no_sync():
            for batch in micro_batches:
                self.backward(*batch)
        self.step(t, sum(batch[0] for batch in micro_batches))

    def require(self, layer, grad_req):
        """Freeze a layer, or train it again."""
        block = (self.net.body, self.net.table, self.net.a, self.net.b)[layer]
        block.collect_params().setattr("grad_req", grad_req)

    def set_data(self, i, seed):
        param, rng = self.params[i], np.random.RandomState(seed)
        param.set_data(mx.nd.array(rng.normal(0, 0.5, param.shape)))

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

    def move(self, k, reverse):
        self.ctx = contexts(k)[:: -1 if reverse else 1]
        self.collect_params().reset_ctx(self.ctx)
        self.unused = {}


class Unlike(Side):
    """A rank of which nothing is known that the others would do: any step may have no gradients."""

    def check_told(self, *batch):
        pass

    def step(self, t, n):
        self.trainers[t].step(n, ignore_stale_grad=True)


class Alone(Side):
    """What is compared with: MXNet alone, on one device."""

    def mine(self, n):
        return slice(n)

    def check_told(self, *batch):
        pass

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

    def accumulate(self, t, *micro_batches):
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
        self.step(t, sum(batch[0] for batch in micro_batches))

    def move(self, k, reverse):
        super().move(1, False)


def event(name, *arguments):
    return st.tuples(st.just(name), st.tuples(*arguments))


def check(kvstore, optimizer, sparse, k, program, two=False):
    options, make = OPTIMIZERS[optimizer], trainers_of(kvstore, optimizer)
    want = Alone(lambda params: stock_trainer(params, optimizer, dict(options)), 1, sparse, two)
    got = Side(make, k, sparse, two)
    got.stale = want.stale
    for name, arguments in program:
        before = want.fresh()
        getattr(want, name)(*arguments)
        try:
            getattr(got, name)(*arguments)
        except CannotBeTold:
            return
        used = before - want.fresh() if name in USES else set()
        got.unused = {key: value for key, value in got.unused.items() if not used & value[1]}
        assert_as_one(got, [param.data().asnumpy() for param in want.params], 1e-4)


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
    of_ranks = cluster.gather((failure, bits))
    if not all(failure for failure, _ in of_ranks):
        failures = [failure[-300:] for failure, _ in of_ranks]
        assert len({*of_ranks}) == 1, (k, program, two, rank, place, change, failures)


def trainers_of(kvstore, optimizer):
    make = gluonpar.Trainer if kvstore is None else by_kvstore
    return lambda params: make(params, optimizer, dict(OPTIMIZERS[optimizer]))


OPTIMIZERS = {
    "sgd": {"learning_rate": 0.05},
    "nag": {"learning_rate": 0.05, "momentum": 0.9},
    # By a smaller epsilon, a sum that is nearly zero is divided by one that is: by its rounding.
    "adam": {"learning_rate": 0.05, "epsilon": 1e-3},
}
EVERY = [*itertools.product((None, "gluonpar"), OPTIMIZERS, (False, True))]


def law(kvstore, optimizer, sparse, num_programs, least_samples=1, unlike=False):
    """That :func:`check` holds, as a function; ranks without samples can skip no batch.

    Or, if they are ``unlike``, :func:`check_unlike`.
    """
    sizes = [n for n in (1, 2, 3, 4, 7, 8) if n >= least_samples]
    size, seed = st.sampled_from(sizes), st.integers(0, 99)
    order = st.one_of(st.just(0), st.integers(0, 23))
    batch = size, st.integers(0, 3), st.sampled_from(WAYS), seed, order, st.sampled_from(ALSO)
    hows = st.sampled_from(("one backward", "loss by loss", "device by device"))
    trainer = st.sampled_from((0, -1))
    requests = ("null", "write") if sparse else ("null", "write", "add")
    events = [
        *[event("train", trainer, *batch) for _ in range(4)],  # the same object would count once
        event("step", trainer, size),
        event("sum", trainer),
        event("require", st.integers(0, 3), st.sampled_from(requests)),
        event("set_data", st.integers(0, 6), st.integers(0, 99)),
        event("set_learning_rate", trainer, st.sampled_from((0.01, 0.1))),
        event("hybridize", st.sampled_from(MODES)),
    ]
    may_skip, dense = least_samples >= cluster.size(), not sparse
    if may_skip:
        events.append(event("backward", *batch))  # and no step
        recorded = st.tuples(size, st.integers(0, 2), seed)
        events.append(event("train_recorded", trainer, recorded, recorded))
        events.append(event("two_losses", trainer, size, hows, st.integers(1, 2), seed, order))
    if cluster.size() == 1:
        events.append(event("resume", trainer))
    if dense:  # MXNet has neither for row_sparse gradients
        events += [event("zero_grad", trainer), event("halve", trainer, *batch)]
    if kvstore is None and cluster.size() == 1:
        events.append(event("move", st.integers(1, 4), st.booleans()))
    if kvstore is None and dense:
        events += [event("clip", trainer, *batch), event("clip_and_step", trainer, *batch)]
    if kvstore is None and dense and may_skip:
        events += [event("accumulate", trainer, *[st.tuples(*batch)] * n) for n in (1, 2, 3)]
        events.append(event("sum_by_hand", trainer, *batch))

    # All ranks must draw the same programs, however long one takes, and shrinking takes minutes.
    alike = {"derandomize": True, "database": None, "deadline": None, "phases": [Phase.generate]}

    two = st.booleans() if may_skip else st.just(False)  # a batch may have nothing for one of two
    drawn = settings(max_examples=num_programs, suppress_health_check=[*HealthCheck], **alike)
    if unlike:
        changes = st.sampled_from(("left out", "later")), st.one_of(events)
        rank, place = st.integers(0, cluster.size() - 1), st.integers(0, 11)
        programs = st.lists(st.one_of(events), min_size=4, max_size=12)

        @drawn
        @given(st.integers(1, 3), programs, two, rank, place, st.one_of(*changes))
        def told(k, program, two, rank, place, change):
            check_unlike(kvstore, optimizer, k, program, two, rank, place, change)

        return told

    @drawn
    @given(st.integers(1, 4), st.lists(st.one_of(events), min_size=4, max_size=12), two)
    def holds(k, program, two):
        check(kvstore, optimizer, sparse, k, program, two)

    return holds
