"""gluonpar.Trainer: K devices give what stock gluon.Trainer gives on one; replicas stay equal."""

import functools
import inspect
import subprocess
import sys
import threading
import types

import gluon_runs as runs
import mxnet as mx
import numpy as np
import pytest
from gluon_runs import STATIC, assert_as_one, contexts, give_grads, weights
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluonpar
from gluonpar import collectives, engine, metrics, owned_updates, replicas
from gluonpar import trainer as trainer_module
from gluonpar.trainer import Trainer

OPTIMIZERS = sorted(mx.optimizer.Optimizer.opt_registry)
KNOWN = {
    *("adadelta", "adagrad", "adam", "adamax", "ccsgd", "dcasgd", "ftml", "ftrl", "groupadagrad"),
    *("lamb", "lars", "lbsgd", "nadam", "nag", "rmsprop", "sgd", "sgld", "signum", "test"),
}
# Under momentum MXNet's DCASGD takes the truth of an array: it fails on one device too.
NO_MOMENTUM = {"dcasgd"}


@pytest.fixture
def small_buckets(monkeypatch):
    """The network's parameters in several buckets, which several devices own."""
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 300)


def make_for(optimizer, **options):
    return functools.partial(runs.mlp, bias=optimizer != "groupadagrad", **options)


def options_of(optimizer, which):
    """The options to be tried: weight decay, or with it clipping, and momentum where it exists."""
    options = {"learning_rate": 0.05, "wd": 0.01}
    if optimizer == "groupadagrad":
        options["wd"] = 0.0  # all it supports; and only matrices, so no biases
    if which == "more":
        options["clip_gradient"] = 0.02
        known = inspect.signature(mx.optimizer.Optimizer.opt_registry[optimizer]).parameters
        if "momentum" in known and optimizer not in NO_MOMENTUM or optimizer == "ccsgd":
            options["momentum"] = 0.9
    return options


@functools.lru_cache(None)
def stock_of(optimizer, which):
    return runs.stock(optimizer, options_of(optimizer, which), make_for(optimizer))


def test_these_are_all_the_optimizers_there_are():
    assert set(OPTIMIZERS) == KNOWN


@pytest.mark.parametrize(
    ("which", "k"), [("wd", 3), ("more", 1), ("more", 2), ("more", 3), ("more", 4)]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_k_devices_train_as_one_with_every_optimizer(optimizer, which, k, small_buckets):
    want = stock_of(optimizer, which)
    net, _ = runs.run(k, optimizer, options_of(optimizer, which), make_for(optimizer))
    assert_as_one(net, want)
    start = runs.start_values(bias=optimizer != "groupadagrad")
    assert all((a != b).any() for a, b in zip(want, start))


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_shapes_may_be_known_later(optimizer, k):
    make = make_for(optimizer, deferred=True)
    net, _ = runs.run(k, optimizer, options_of(optimizer, "more"), make)
    assert_as_one(net, stock_of(optimizer, "more"))


@pytest.mark.parametrize("clip", [0, -1.0])
def test_a_clip_gradient_of_zero_or_less_clips_nothing_as_in_mxnet(clip):
    options = {"learning_rate": 0.05, "clip_gradient": clip}
    net, _ = runs.run(2, "sgd", options)
    assert_as_one(net, runs.stock("sgd", options))


SCHEDULES = {
    "factor": lambda: mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1),
    "multifactor": lambda: mx.lr_scheduler.MultiFactorScheduler([1, 3], 0.3, base_lr=0.1),
    "poly": lambda: mx.lr_scheduler.PolyScheduler(6, 0.1),
    "cosine": lambda: mx.lr_scheduler.CosineScheduler(6, 0.1, warmup_steps=2),
}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lars", "lbsgd"])
def test_rates_follow_their_schedule(optimizer, schedule, k, small_buckets):
    def options():
        more = {} if optimizer in ("adam", "nadam") else {"momentum": 0.9}
        return {"lr_scheduler": SCHEDULES[schedule](), "learning_rate": 0.1, **more}

    want = runs.stock(optimizer, options())
    net, trainer = runs.run(k, optimizer, options())
    assert_as_one(net, want)
    assert trainer.learning_rate == options()["lr_scheduler"](5)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
@pytest.mark.parametrize("optimizer", ["sgd", "nag"])
def test_each_parameter_has_its_multipliers(optimizer, options, k):
    def make(ctx):
        net = runs.mlp(ctx)
        net[0].weight.lr_mult, net[1].weight.wd_mult, net[2].bias.lr_mult = 0.1, 10.0, 0.0
        return net

    options = {"learning_rate": 0.1, "wd": 0.1, **options}
    net, _ = runs.run(k, optimizer, options, make)
    assert_as_one(net, runs.stock(optimizer, options, make))
    np.testing.assert_array_equal(net[2].bias.list_data()[0].asnumpy(), runs.start_values()[5])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_rate_can_be_set_between_steps(momentum):
    results = []
    for k, kind in ((1, functools.partial(gluon.Trainer, kvstore=None)), (3, Trainer)):
        net = runs.mlp(contexts(k))
        trainer = kind(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": momentum})
        for rate, batch in zip((0.1, 0.7, 0.02), runs.batches()):
            trainer.set_learning_rate(rate)
            assert trainer.learning_rate == rate
            runs.train(net, trainer, [batch], contexts(k))
        results.append(net)
    assert_as_one(results[1], runs.values(results[0]))


class Plain(gluon.Block):
    """A Block that is no HybridBlock, with a loop and a shared layer."""

    def __init__(self, ctx):
        super().__init__(prefix="plain_")
        with self.name_scope():
            self.first = nn.Dense(8, "tanh", in_units=6)
            self.again = nn.Dense(8, "tanh", in_units=8)
            self.shared = nn.Dense(8, "tanh", in_units=8, params=self.again.params)
            self.last = nn.Dense(3, in_units=8)
        self.initialize(ctx=ctx)
        rng = np.random.RandomState(5)
        runs.fill(self, [rng.normal(0, 0.4, p.shape) for p in self.collect_params().values()])

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = self.shared(self.again(x))
        return self.last(x)


def symbol_block(ctx):
    data = x = mx.sym.var("data", dtype="float32")
    x = mx.sym.tanh(mx.sym.FullyConnected(x, num_hidden=10, name="a"))
    net = gluon.SymbolBlock(mx.sym.FullyConnected(x, num_hidden=3, name="b"), data)
    net.initialize(ctx=ctx)
    rng = np.random.RandomState(6)
    shapes = [(10, 6), (10,), (3, 10), (3,)]
    for param, shape in zip(net.collect_params().values(), shapes):
        param.set_data(mx.nd.array(rng.normal(0, 0.4, shape)))
    return net


def convolution(ctx):
    """Kernels that oneDNN keeps in a layout of its own once it has computed with them."""
    net = nn.HybridSequential(prefix="conv_")
    with net.name_scope():
        net.add(nn.HybridLambda(lambda F, x: F.reshape(F.tile(x, reps=(1, 24)), (-1, 4, 6, 6))))
        net.add(nn.Conv2D(16, 3, activation="tanh", in_channels=4), nn.Dense(3, in_units=256))
    net.initialize(ctx=ctx)
    rng = np.random.RandomState(7)
    runs.fill(net, [rng.normal(0, 0.2, p.shape) for p in net.collect_params().values()])
    net.hybridize(**STATIC)
    return net


NETS = {
    "block": Plain,
    "symbol block": symbol_block,
    "hybridized": functools.partial(runs.mlp, hybridize={}),
    "static_alloc": functools.partial(runs.mlp, hybridize={"static_alloc": True}),
    "static": functools.partial(runs.mlp, hybridize=STATIC),
    "deferred hybridized": functools.partial(runs.mlp, deferred=True, hybridize={}),
    "deferred static": functools.partial(runs.mlp, deferred=True, hybridize=STATIC),
    "convolution": convolution,
}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", NETS)
def test_any_kind_of_network_is_trained(name, optimizer, k, small_buckets):
    """Batches come again in other sizes, some smaller than the number of devices."""
    data = runs.batches((7, 2, 8, 1, 5, 8, 9, 2, 7))
    options = {"learning_rate": 0.05, "wd": 0.01}
    net, _ = runs.run(k, optimizer, options, NETS[name], data)
    assert_as_one(net, runs.stock(optimizer, options, NETS[name], data))


def frozen(ctx):
    net = runs.mlp(ctx)
    net[1].collect_params().setattr("grad_req", "null")
    return net


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_frozen_parameters_stay(optimizer, small_buckets):
    net, _ = runs.run(3, optimizer, make=frozen)
    assert_as_one(net, runs.stock(optimizer, make=frozen))
    for i in (2, 3):
        np.testing.assert_array_equal(runs.values(net, 2)[i], runs.start_values()[i])


def test_with_all_parameters_frozen_there_is_nothing_to_do():
    [param] = weights([[1.0, 2.0]], 2, grad_req="null")
    trainer = Trainer([param], "sgd")
    trainer.step(1)
    assert param.list_data()[1].asnumpy().tolist() == [1, 2]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_grad_req_add_accumulates_until_zero_grad(optimizer):
    def adding(k, kind):
        ctx = contexts(k)
        net = runs.mlp(ctx)
        params = net.collect_params()
        params.setattr("grad_req", "add")
        trainer = kind(params, optimizer, {"learning_rate": 0.05})
        for first, second in zip(runs.batches(), runs.batches(seed=2)):
            params.zero_grad()
            runs.backward(net, first, ctx)
            runs.backward(net, second, ctx)
            trainer.step(len(first[0]) + len(second[0]))
        return net

    want = runs.values(adding(1, functools.partial(gluon.Trainer, kvstore=None)))
    assert_as_one(adding(3, Trainer), want)


@mx.util.use_np
def train_np(k, optimizer, kind):
    ctx = contexts(k)
    net = nn.HybridSequential(prefix="np_")
    with net.name_scope():
        net.add(nn.Dense(10, "tanh", in_units=6), nn.Dense(8, "tanh"), nn.Dense(3))
    net.initialize(ctx=ctx)
    for param, value in zip(net.collect_params().values(), runs.start_values()):
        param.set_data(mx.np.array(value))
    trainer = kind(net.collect_params(), optimizer, {"learning_rate": 0.05, "wd": 0.01})
    for X, y in runs.batches():
        shards = gluonpar.split_and_load((X, y), ctx)
        with autograd.record():
            losses = [runs.LOSS(net(X_shard), y_shard) for X_shard, y_shard in shards]
        autograd.backward(losses)
        trainer.step(len(X))
    if kind is Trainer:
        assert isinstance(net[0].weight.data(ctx[-1]), mx.np.ndarray)
        assert isinstance(net[0].weight.grad(ctx[-1]), mx.np.ndarray)
        trainer.check_replicas()
    return net


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
def test_the_numpy_world_trains_as_the_other(optimizer):
    want = runs.stock(optimizer, {"learning_rate": 0.05, "wd": 0.01})
    assert_as_one(train_np(3, optimizer, Trainer), want)
    assert_as_one(train_np(1, optimizer, functools.partial(gluon.Trainer, kvstore=None)), want)


@pytest.mark.parametrize("optimizer", ["sgd", "nag"])
def test_float64_is_trained_in_float64(optimizer, small_buckets):
    options = {"learning_rate": 0.05, "momentum": 0.9}
    make, data = functools.partial(runs.mlp, dtype="float64"), runs.batches(dtype="float64")
    net, _ = runs.run(3, optimizer, options, make, data)
    assert_as_one(net, runs.stock(optimizer, options, make, data), 1e-12)
    assert {value.dtype for value in runs.values(net)} == {np.dtype("float64")}


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "nag"])
def test_float16_with_multi_precision_is_updated_in_float32(optimizer, options):
    """To the bit: sums of small integers are exact in float16 (MXNet has no float16 networks here).

    The steps are so small that without a float32 copy most of them would be lost.
    """
    options = {} if optimizer == "adam" else options
    options = {"learning_rate": 1e-4, "multi_precision": True, **options}
    rng = np.random.RandomState(0)
    start = [rng.normal(size=size) for size in (40, 7)]
    many, one = ([*weights(start, k, dtype="float16")] for k in (3, 1))
    mine = Trainer(many, optimizer, dict(options))
    theirs = gluon.Trainer(one, optimizer, dict(options), kvstore=None)
    for _ in range(20):
        grads = [rng.randint(-9, 10, (3, *param.shape)) for param in many]
        give_grads(many, grads)
        give_grads(one, [[grad.sum(axis=0)] for grad in grads])
        mine.step(4)
        theirs.step(4)
    for param, other, value in zip(many, one, start):
        want = other.data().asnumpy()
        assert (want != value.astype("float16")).mean() > 0.3
        for copy in param.list_data():
            assert copy.asnumpy().tobytes() == want.tobytes()
    states = [a for a in flatten(mine._updater.states.values()) if a is not None]
    assert {np.dtype(state.dtype).name for state in states} == {"float32"}


def flatten(nest):
    for part in nest:
        yield from flatten(part) if isinstance(part, (tuple, list)) else [part]


def test_parameters_of_several_dtypes_are_trained_together():
    """Exact: all in powers of two. Neighbours of different dtypes cannot share a bucket."""
    dtypes = ["float32", "float16", "float64", "float32"]
    params = [weights([[1.0, 2.0]], 3, dtype=dtype)[0] for dtype in dtypes]
    for optimizer in ("sgd", "test"):
        options = {"learning_rate": 0.5, "multi_precision": True}
        trainer = Trainer(params, optimizer, options)
        for param in params:
            param.set_data(mx.nd.array([1.0, 2.0]))
        give_grads(params, [[1.0, 2.0, 5.0]] * 4)
        trainer.step(4)
        moved = 1.0 if optimizer == "sgd" else 2.0  # 'test' adds its gradients, without a rate
        sign = -1 if optimizer == "sgd" else 1
        for param in params:
            for value in param.list_data():
                assert value.asnumpy().tolist() == [1 + sign * moved, 2 + sign * moved]


@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
def test_every_algorithm_can_be_chosen(algorithm, optimizer, compression):
    options = {"learning_rate": 0.05}
    more = {"algorithm": algorithm, "compression": compression}
    net, _ = runs.run(3, optimizer, options, **more)
    # float16 rounds a gradient by 2**-11 of it; Adam divides by its size, so that stays as it is
    assert_as_one(net, runs.stock(optimizer, options), 1e-3 if compression else 1e-5)


def test_the_algorithm_named_is_the_one_used(monkeypatch):
    called = []

    def note(lists, algorithm=None):
        called.append((algorithm, "as it is"))

    monkeypatch.setattr(trainer_module, "allreduce_many", note)
    monkeypatch.setattr(
        trainer_module, "allreduce_as_float16", lambda lists, name: called.append((name, "fp16"))
    )
    monkeypatch.setattr(
        owned_updates.fused, "reduce_update", lambda items: called.append("in one pass")
    )
    for algorithm, compression in (("ring", None), ("tree", "fp16"), ("host", None), (None, None)):
        params = weights([[1.0]], 2)
        trainer = Trainer(params, "sgd", algorithm=algorithm, compression=compression)
        give_grads(params, [[1.0, 1.0]])
        trainer.step(1)
    once = "in one pass"
    assert called == [("ring", "as it is"), ("tree", "fp16"), once, once]


@pytest.mark.parametrize("optimizer", ["sgd", "test"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compression_is_exact_for_what_float16_holds(dtype, optimizer):
    """2048 + 1 is no float16: the sum is taken in float32, and only then rounded."""
    params = weights([[1.0, 2.0, 3.0]], 3, dtype=dtype)
    trainer = Trainer(params, optimizer, {"learning_rate": 1.0}, compression="fp16")
    give_grads(params, [[[1.0, 2048.0, 0.5], [2.0, 1.0, 0.25], [4.0, 1.0, 0.125]]])
    trainer.step(1)
    sign = {"sgd": -1, "test": 1}[optimizer]
    want = np.array([1, 2, 3]) + sign * np.array([7, 2050, 0.875])
    for value in params[0].list_data():
        assert value.asnumpy().tolist() == want.tolist()


def test_compression_really_rounds():
    params = weights([[0.0]], 2)
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, compression="fp16")
    give_grads(params, [[1 + 2.0**-12, 1.0]])
    trainer.step(1)
    assert params[0].list_data()[0].asscalar() == -2


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("make", [runs.mlp, NETS["static"], NETS["deferred static"]])
def test_batches_with_fewer_samples_than_devices(optimizer, make):
    """A device without samples adds nothing, neither zero nor what it had computed before."""
    data = runs.batches((1, 8, 2, 8, 3, 1))
    net, _ = runs.run(4, optimizer, make=make, data=data)
    assert_as_one(net, runs.stock(optimizer, data=data))


# no_sync


def accumulated(net, trainer, batch, ctx, parts=3):
    """One step on ``batch``, in micro-batches; the last one outside."""
    X, y = batch
    pieces = list(zip(np.array_split(X, parts), np.array_split(y, parts)))
    with trainer.no_sync():
        for piece in pieces[:-1]:
            runs.backward(net, piece, ctx)
    runs.backward(net, pieces[-1], ctx)
    trainer.step(len(X))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("how", ["mlp", "block", "hybridized", "static", "convolution"])
def test_micro_batches_are_one_large_batch(how, optimizer, k):
    """Every second step is an ordinary one: it starts from zero, not from what was added up."""
    make, ctx = {"mlp": runs.mlp, **NETS}[how], contexts(k)
    net, data = make(ctx), runs.batches((7, 9, 2, 8, 11, 5))
    trainer = Trainer(net.collect_params(), optimizer, {"learning_rate": 0.05})
    for i, batch in enumerate(data):
        if i % 2:
            runs.train(net, trainer, [batch], ctx)
        else:
            accumulated(net, trainer, batch, ctx, parts=2)
    assert_as_one(net, runs.stock(optimizer, {"learning_rate": 0.05}, make, data))


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_micro_batches_of_a_static_network_that_learnt_its_shapes_late(optimizer, first):
    """It writes to arrays that are not the trainer's, and must not find old numbers there."""
    ctx, make = contexts(2), NETS["deferred static"]
    net, data = make(ctx), runs.batches((7, 9, 12, 8, 11, 5))
    trainer = Trainer(net.collect_params(), optimizer, {"learning_rate": 0.05})
    runs.train(net, trainer, data[:first], ctx)
    for batch in data[first:-1]:
        accumulated(net, trainer, batch, ctx)
    runs.train(net, trainer, data[-1:], ctx)
    assert_as_one(net, runs.stock(optimizer, {"learning_rate": 0.05}, data=data))


def test_all_micro_batches_may_be_inside_and_in_several_blocks():
    params = weights([[0.0]], 2)
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    for grad in (1.0, 2.0):
        with trainer.no_sync():
            give_grads(params, [[grad, 8 * grad]])
    trainer.step(1)
    assert params[0].list_data()[1].asscalar() == -27
    give_grads(params, [[1.0, 1.0]])
    trainer.step(1)
    assert params[0].list_data()[0].asscalar() == -29


def test_no_sync_starts_from_zero_though_a_backward_was_never_used():
    params = weights([[0.0]], 2)
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    give_grads(params, [[64.0, 64.0]])
    with trainer.no_sync():
        give_grads(params, [[1.0, 1.0]])
    trainer.step(1)
    assert params[0].list_data()[0].asscalar() == -2


@pytest.mark.parametrize("what", ["step", "update", "allreduce_grads", "step after an inner one"])
def test_nothing_can_be_exchanged_inside_no_sync(what):
    params = weights([[1.0]], 2)
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    with trainer.no_sync():
        give_grads(params, [[1.0, 2.0]])
        if "inner" in what:
            with trainer.no_sync():
                give_grads(params, [[1.0, 0.0]])
        before = runs.bits(params)
        arguments = () if what == "allreduce_grads" else (1,)
        with pytest.raises(ValueError, match="leave it before step"):
            getattr(trainer, what.split()[0])(*arguments)
        assert runs.bits(params) == before
    trainer.step(1)
    assert params[0].list_data()[0].asscalar() == (-3 if "inner" in what else -2)


def test_no_sync_of_parameters_without_shape_says_which():
    net = runs.mlp(contexts(2), deferred=True)
    trainer = Trainer(net.collect_params(), "sgd")
    with pytest.raises(gluon.parameter.DeferredInitializationError, match="mlp_dense0_weight"):
        with trainer.no_sync():
            pass
    runs.train(net, trainer, runs.batches(), contexts(2))
    assert_as_one(net, runs.stock())


def test_an_exception_inside_no_sync_does_not_end_the_accumulation():
    params = weights([[0.0]], 2)
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    with pytest.raises(KeyError), trainer.no_sync():
        give_grads(params, [[1.0, 2.0]])
        raise KeyError("the loader failed")
    give_grads(params, [[4.0, 8.0]])
    trainer.step(1)
    assert params[0].list_data()[0].asscalar() == -15


# between the sum and the update


@pytest.mark.parametrize("make", [runs.mlp, NETS["deferred static"]])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_allreduce_grads_then_update_is_step(optimizer, make):
    ctx = contexts(3)
    net = make(ctx)
    trainer = Trainer(net.collect_params(), optimizer, {"learning_rate": 0.05})
    for batch in runs.batches((7, 8, 2, 8)):
        runs.backward(net, batch, ctx)
        trainer.allreduce_grads()
        for param in net.collect_params().values():
            first, *others = (grad.asnumpy() for grad in param.list_grad())
            assert all(first.tobytes() == other.tobytes() for other in others)
        trainer.update(len(batch[0]))
    data = runs.batches((7, 8, 2, 8))
    assert_as_one(net, runs.stock(optimizer, {"learning_rate": 0.05}, data=data))


@pytest.mark.parametrize("make", [runs.mlp, NETS["hybridized"], NETS["static"]])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_users_own_allreduce_then_update_is_step(optimizer, make):
    ctx = contexts(3)
    net = make(ctx)
    trainer = Trainer(net.collect_params(), optimizer, {"learning_rate": 0.05})
    for batch in runs.batches():
        runs.backward(net, batch, ctx)
        gluonpar.allreduce_many([param.list_grad() for param in net.collect_params().values()])
        trainer.update(len(batch[0]))
    assert_as_one(net, runs.stock(optimizer, {"learning_rate": 0.05}))


def test_the_users_own_allreduce_of_arrays_that_are_not_the_gradients_is_an_error():
    """A static network that learnt its shapes late: list_grad() is wrong until Trainer looks."""
    ctx, make = contexts(2), NETS["deferred static"]
    net, [first, second, *others] = make(ctx), runs.batches()
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    runs.train(net, trainer, [first], ctx)
    runs.backward(net, second, ctx)
    before = [value.tobytes() for value in runs.values(net)]
    with pytest.raises(UserWarning, match="mlp_dense0_weight.*sum with Trainer.allreduce_grads"):
        trainer.update(len(second[0]))
    assert [value.tobytes() for value in runs.values(net)] == before
    trainer.allreduce_grads()
    trainer.update(len(second[0]))
    runs.train(net, trainer, others, ctx)
    assert_as_one(net, runs.stock(options={"learning_rate": 0.05}))


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e6])
@pytest.mark.parametrize("k", [1, 3])
def test_clip_global_norm_is_numpys_and_the_stock_ones(max_norm, k, small_buckets):
    ctx, [batch] = contexts(k), runs.batches((7,))
    net, one = runs.mlp(ctx), runs.mlp(contexts(1))
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    runs.backward(net, batch, ctx)
    runs.backward(one, batch, contexts(1))
    grads = [param.grad() for param in one.collect_params().values()]
    norm = np.sqrt(sum((grad.asnumpy().astype("float64") ** 2).sum() for grad in grads))
    want = [grad.asnumpy() * min(1.0, max_norm / norm) for grad in grads]
    stock = gluon.utils.clip_global_norm(grads, max_norm)
    trainer.allreduce_grads()
    found = trainer.clip_global_norm(max_norm)
    assert (found.shape, found.dtype, found.context) == ((1,), np.float32, ctx[0])
    assert found.asscalar() == pytest.approx(norm, rel=1e-5)
    assert found.asscalar() == pytest.approx(float(stock), rel=1e-5)
    for param, value, theirs in zip(net.collect_params().values(), want, grads):
        for grad in param.list_grad():
            assert np.abs(grad.asnumpy() - value).max() <= 1e-5 * np.abs(value).max()
            assert np.abs(grad.asnumpy() - theirs.asnumpy()).max() <= 1e-5 * np.abs(value).max()
    trainer.update(len(batch[0]))
    moved = [a - b / 7 for a, b in zip(runs.start_values(), want)]
    assert_as_one(net, moved)


def test_clip_global_norm_counts_every_dtype_and_pinned_parameters():
    """3-4-12: the norm of the sums is 13."""
    params = [
        weights([[1.0, 1.0]], 2, dtype=dtype)[0] for dtype in ("float32", "float16", "float64")
    ]
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    give_grads(params, [[[1.0, 0.0], [2.0, 0.0]], [[2.0, 0], [2.0, 0]], [[0, 6.0], [0, 6.0]]])
    trainer.allreduce_grads()
    assert trainer.clip_global_norm(6.5).asscalar() == 13
    halves = [param.list_grad()[1].asnumpy() for param in params]
    np.testing.assert_allclose(halves, [[1.5, 0], [2, 0], [0, 6]], rtol=1e-3)


def test_clip_global_norm_of_no_gradient_is_zero():
    params = weights([[1.0]], 2)
    trainer = Trainer(params, "sgd")
    give_grads(params, [[0.0, 0.0]])
    trainer.allreduce_grads()
    assert trainer.clip_global_norm(1.0).asscalar() == 0
    trainer.update(1)
    assert params[0].list_data()[0].asscalar() == 1


@pytest.mark.parametrize("device", [1, 2])
@pytest.mark.parametrize("number", range(6))
def test_check_replicas_finds_one_bit(device, number):
    net, trainer = runs.run(3)
    trainer.check_replicas()
    param = list(net.collect_params().values())[number]
    copy = param.list_data()[device]
    changed = copy.asnumpy()
    changed.reshape(-1).view("uint32")[-1] ^= 1
    copy[:] = mx.nd.array(changed)
    with pytest.raises(metrics.ReplicasDiffer, match=rf"{param.name} .*cpu\(0\).*cpu\({device}\)"):
        trainer.check_replicas()


def test_statistics_of_batch_normalisation_may_differ():
    def make(ctx):
        net = nn.HybridSequential(prefix="bn_")
        with net.name_scope():
            net.add(nn.Dense(8, in_units=6), nn.BatchNorm(in_channels=8), nn.Dense(3, in_units=8))
        net.initialize(ctx=ctx)
        return net

    net, trainer = runs.run(2, make=make)
    means = [mean.asnumpy() for mean in net[1].running_mean.list_data()]
    assert (means[0] != means[1]).any()
    trainer.check_replicas()


# what users do between steps


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("what", ["set_data", "load_parameters", "freeze", "thaw", "add", "init"])
def test_parameters_may_be_changed_between_steps(what, optimizer, tmp_path):
    source = runs.mlp(contexts(1))
    runs.fill(source, runs.start_values(seed=9))
    source.save_parameters(str(tmp_path / "p"))

    def change(net):
        if what == "set_data":
            net[1].weight.set_data(mx.nd.array(runs.start_values(seed=8)[2]))
        elif what == "load_parameters":
            net.load_parameters(str(tmp_path / "p"))
        elif what == "init":
            net.initialize(ctx=net[0].weight.list_ctx(), force_reinit=True)
            runs.fill(net, runs.start_values(seed=9))
        elif what == "add":
            net.collect_params().setattr("grad_req", "add")
            net.collect_params().zero_grad()
        else:
            net[1].collect_params().setattr("grad_req", {"thaw": "write"}.get(what, "null"))

    def make(ctx):
        return frozen(ctx) if what == "thaw" else runs.mlp(ctx)

    results = []
    for k, kind in ((1, functools.partial(gluon.Trainer, kvstore=None)), (3, Trainer)):
        net = make(contexts(k))
        trainer = kind(net.collect_params(), optimizer, {"learning_rate": 0.05})
        runs.train(net, trainer, runs.batches((7, 8)), contexts(k))
        change(net)
        for batch in runs.batches((8, 2, 9)):
            if what == "add":
                net.collect_params().zero_grad()
            runs.train(net, trainer, [batch], contexts(k))
        results.append(net)
    assert_as_one(results[1], runs.values(results[0]))


def test_a_cast_between_steps():
    def cast(k, kind):
        net = runs.mlp(contexts(k))
        trainer = kind(net.collect_params(), "sgd", {"learning_rate": 0.05})
        runs.train(net, trainer, runs.batches((7, 8)), contexts(k))
        net.cast("float64")
        runs.train(net, trainer, runs.batches((8, 2), dtype="float64"), contexts(k))
        return net

    net = cast(3, Trainer)
    assert net[0].weight.list_data()[2].dtype == np.float64
    assert_as_one(net, runs.values(cast(1, functools.partial(gluon.Trainer, kvstore=None))))


@pytest.mark.parametrize("ks", [(2, 4), (3, 1), (1, 3)])
@pytest.mark.parametrize("optimizer", ["sgd", "nag", "adam", "lamb", "nadam"])
def test_the_devices_may_change_between_steps(optimizer, ks, small_buckets):
    """States and counters go along. Averaging over three devices rounds, in reset_ctx."""
    options = {"learning_rate": 0.05}
    if optimizer in ("sgd", "nag"):
        options["momentum"] = 0.9
    net, data = runs.mlp(contexts(ks[0])), runs.batches()
    trainer = Trainer(net.collect_params(), optimizer, options)
    runs.train(net, trainer, data[:2], contexts(ks[0]))
    net.collect_params().reset_ctx(contexts(ks[1]))
    runs.train(net, trainer, data[2:], contexts(ks[1]))
    assert_as_one(net, runs.stock(optimizer, options))


def adversaries(k, kind, hybridize=None):
    """Two networks against each other: the second is called twice in one of the two steps."""
    ctx = contexts(k)
    forger = nn.HybridSequential(prefix="forger_")
    judge = nn.HybridSequential(prefix="judge_")
    with forger.name_scope():
        forger.add(nn.Dense(8, "tanh", in_units=6), nn.Dense(6, in_units=8))
    with judge.name_scope():
        judge.add(nn.Dense(8, "tanh", in_units=6), nn.Dense(1, in_units=8))
    rng = np.random.RandomState(4)
    for net in (forger, judge):
        net.initialize(ctx=ctx)
        runs.fill(net, [rng.normal(0, 0.5, p.shape) for p in net.collect_params().values()])
        if hybridize is not None:
            net.hybridize(**hybridize)
    loss = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    options = {"learning_rate": 0.05}
    trainers = [kind(net.collect_params(), "adam", dict(options)) for net in (forger, judge)]
    for (real, _), (noise, _) in zip(runs.batches(), runs.batches(seed=2)):
        shards = gluonpar.split_and_load((real, noise), ctx)
        with autograd.record():
            losses = []
            for real_shard, noise_shard in shards:
                ones = mx.nd.ones((len(real_shard),), ctx=real_shard.context)
                false = judge(forger(noise_shard).detach())
                losses.append(loss(judge(real_shard), ones) + loss(false, 0 * ones))
        autograd.backward(losses)
        trainers[1].step(len(real))
        with autograd.record():
            losses = []
            for _, noise_shard in shards:
                ones = mx.nd.ones((len(noise_shard),), ctx=noise_shard.context)
                losses.append(loss(judge(forger(noise_shard)), ones))
        autograd.backward(losses)
        trainers[0].step(len(real))
    return forger, judge


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("hybridize", [None, {}, STATIC])
def test_two_trainers_of_two_networks(hybridize, k):
    stock = adversaries(1, functools.partial(gluon.Trainer, kvstore=None))
    for mine, theirs in zip(adversaries(k, Trainer, hybridize), stock):
        assert_as_one(mine, runs.values(theirs))


def test_a_second_trainer_of_the_same_network():
    """It takes over, whatever the static network believes of its gradients' arrays."""
    ctx = contexts(2)
    results = []
    for k, kind in ((1, functools.partial(gluon.Trainer, kvstore=None)), (2, Trainer)):
        ctx = contexts(k)
        net = runs.mlp(ctx, hybridize=STATIC if k > 1 else None)
        for optimizer in ("sgd", "adam"):
            trainer = kind(net.collect_params(), optimizer, {"learning_rate": 0.05})
            runs.train(net, trainer, runs.batches(), ctx)
        results.append(net)
    assert_as_one(results[1], runs.values(results[0]))


@pytest.mark.parametrize("accumulate", [False, True])
def test_an_overflow_skips_the_update_and_nothing_else(accumulate):
    """What MXNet's mixed precision puts into a trainer; afterwards no sum is left over."""
    params = weights([[1.0]], 2)
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    seen = []

    def has_overflow(given):
        seen.append([float(given[0].list_grad()[k].asscalar()) for k in range(2)])
        return np.isinf(seen[-1]).any()

    trainer._amp_loss_scaler = types.SimpleNamespace(has_overflow=has_overflow)
    for grad in (np.inf, 2.0):
        if accumulate:
            with trainer.no_sync():
                give_grads(params, [[grad, 1.0]])
        else:
            give_grads(params, [[grad, 1.0]])
        trainer.step(1)
    assert seen == [[np.inf, np.inf], [3.0, 3.0]]
    assert params[0].list_data()[1].asscalar() == -2


# errors


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_unused_parameter_is_named_with_its_device(optimizer):
    params = weights([[1.0], [2.0]], 3)
    trainer = Trainer(params, optimizer, {"learning_rate": 1.0})
    give_grads(params, [[1.0, 2.0, 3.0], [1.0, None, 3.0]])
    before = runs.bits(params)
    with pytest.raises(UserWarning, match=r"parameter w1 on cpu\(1\) since .*ignore_stale_grad"):
        trainer.step(1)
    assert runs.bits(params) == before
    assert trainer._updater.states == {} and trainer.optimizer.num_update == 0


def test_ignore_stale_grad_leaves_what_was_not_used():
    """w1 is used on one device only: it is updated by what that one has; w2 on none, and stays."""
    params = weights([[1.0], [2.0], [4.0]], 2)
    for trainer in (
        Trainer(params, "sgd", {"learning_rate": 1.0}),
        Trainer(params, "sgd", {"learning_rate": 1.0}, algorithm="ring"),
        Trainer(params, "test", {"rescale_grad": -1.0}),
    ):
        for param, value in zip(params, (1.0, 2.0, 4.0)):
            param.set_data(mx.nd.array([value]))
        give_grads(params, [[64.0, 64.0]] * 3)
        for param in params:  # old numbers that must not be added
            for value in param.list_data():
                value._fresh_grad = False
        give_grads(params, [[8.0, 16.0], [None, 32.0], [None, None]])
        trainer.step(1, ignore_stale_grad=True)
        for device in range(2):
            found = [param.list_data()[device].asscalar() for param in params]
            assert found == [1 - 24, 2 - 32, 4]
        assert 2 not in trainer.optimizer._index_update_count


@pytest.mark.parametrize("k", [1, 3])
def test_a_step_without_backward_is_an_error(k):
    net, trainer = runs.run(k)
    params = list(net.collect_params().values())
    before, count = runs.bits(params), trainer.optimizer.num_update
    for call in (trainer.step, trainer.update):
        with pytest.raises(UserWarning, match="call backward before step"):
            call(8)
    assert (runs.bits(params), trainer.optimizer.num_update) == (before, count)
    trainer.step(8, ignore_stale_grad=True)
    assert trainer.optimizer.num_update == count
    assert runs.values(net)[0].tobytes() == before[0]


@pytest.mark.parametrize("batch_size", [0, -3, float("nan")])
def test_a_batch_size_that_cannot_be_divided_by(batch_size):
    params = weights([[1.0]], 2)
    trainer = Trainer(params, "sgd")
    give_grads(params, [[1.0, 1.0]])
    before = runs.bits(params)
    for call in (trainer.step, trainer.update):
        with pytest.raises(ValueError, match=f"batch_size={batch_size}.*give 1 or more"):
            call(batch_size)
    assert runs.bits(params) == before


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
def test_a_norm_that_leaves_nothing(max_norm):
    params = weights([[1.0]], 2)
    trainer = Trainer(params, "sgd")
    with pytest.raises(ValueError, match=f"max_norm={max_norm} .*positive"):
        trainer.clip_global_norm(max_norm)


def test_parameters_on_other_contexts_are_named():
    [here], [there] = weights([[1.0]], 2), weights([[1.0]], 3)
    there.name = "far"
    with pytest.raises(ValueError, match=r"far is on \[cpu\(0\), cpu\(1\), cpu\(2\)\], but w0 on"):
        Trainer([here, there], "sgd")
    there.reset_ctx(contexts(2))
    trainer = Trainer([here, there], "sgd", {"learning_rate": 1.0})
    there.reset_ctx(contexts(3))
    give_grads([here, there], [[1.0, 1.0], [1.0, 1.0, 1.0]])
    before = runs.bits([here, there])
    with pytest.raises(ValueError, match="far is on .*initialize all on the same contexts"):
        trainer.step(1)
    assert runs.bits([here, there]) == before


def test_sparse_parameters_are_refused():
    embedding = nn.Embedding(4, 2, sparse_grad=True)
    embedding.initialize(ctx=contexts(2))
    with pytest.raises(ValueError, match="_weight is sparse .*row_sparse.*sparse_grad=False"):
        Trainer(embedding.collect_params(), "sgd")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "magic"}, "'magic'.*ring"),
        ({"compression": "2bit"}, "compression='2bit'; it is None or 'fp16'"),
    ],
)
def test_unknown_ways_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Trainer(weights([[1.0]], 2), "sgd", **options)


@pytest.mark.parametrize("params", [5, "text", [5], [mx.nd.ones(1)], {"a": 5}, None])
def test_what_is_no_parameter_is_refused(params):
    with pytest.raises(ValueError, match="a list or dict of Parameters"):
        Trainer(params, "sgd")


def test_one_parameter_alone_is_not_a_list():
    [param] = weights([[1.0]], 1)
    with pytest.raises(ValueError, match="a list or dict of Parameters"):
        Trainer(param, "sgd")


def test_the_same_parameter_twice_is_refused():
    [param] = weights([[1.0]], 2)
    with pytest.raises(ValueError, match="w0 is given more than once"):
        Trainer([param, param], "sgd")


def test_uninitialised_parameters_are_named():
    with pytest.raises(RuntimeError, match="'w' has not been initialized"):
        Trainer([gluon.Parameter("w", shape=(1,))], "sgd")


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("change", ["more", "fewer", "another"])
def test_a_set_of_parameters_that_changes_later_is_an_error(kind, change):
    params = weights([[1.0], [2.0]], 2)
    [extra] = weights([[3.0]], 2)
    given = kind(params) if kind is list else {param.name: param for param in params}
    trainer = Trainer(given, "sgd", {"learning_rate": 1.0})
    last = 1 if kind is list else "w1"
    if change == "more":
        given.append(extra) if kind is list else given.update(extra=extra)
    elif change == "fewer":
        given.pop(last)
    else:
        given[last] = extra
    give_grads(params, [[1.0, 1.0]] * 2)
    before = runs.bits(params)
    with pytest.raises(ValueError, match="set of parameters has changed.*make a new Trainer"):
        trainer.step(1)
    assert runs.bits(params) == before


# nothing waits


@pytest.mark.parametrize("do", ["step", "adam", "no_sync", "allreduce_grads", "ring", "stale"])
def test_it_does_not_wait_for_the_gradients(do):
    """A gradient is held back until the trainer has returned: what waits would not return."""
    params = weights([[1.0, 2.0], [4.0]], 2)
    optimizer = "adam" if do == "adam" else "sgd"
    algorithm = "ring" if do == "ring" else None
    trainer = Trainer(params, optimizer, {"learning_rate": 1.0}, algorithm)
    give_grads(params, [[1.0, 2.0], [3.0, 5.0]])
    gate, passed = threading.Event(), []
    last = params[1].list_grad()[1]
    engine.push(lambda: passed.append(gate.wait(60)), mx.cpu(1), writes=[last])
    last += 1
    if do == "no_sync":
        with trainer.no_sync():
            give_grads(params, [[1.0, 2.0], [3.0, 6.0]])
        trainer.step(1)
    elif do == "allreduce_grads":
        trainer.allreduce_grads()
        norm = trainer.clip_global_norm(1e6)
        trainer.update(1)
    elif do == "stale":
        params[0].list_data()[0]._fresh_grad = False
        trainer.step(1, ignore_stale_grad=True)
    else:
        trainer.step(1)
    assert passed == []
    gate.set()
    found = [param.list_data()[1].asnumpy().tolist() for param in params]
    first = 2 if do == "stale" else 3
    want = [[1 - first, 2 - first], [-5]]
    if do == "adam":
        np.testing.assert_allclose(found[0] + found[1], [0, 1, 3], atol=1e-5)
    else:
        assert found == want
    if do == "allreduce_grads":
        assert norm.asscalar() == pytest.approx(np.sqrt(9 + 9 + 81), rel=1e-6)
    assert passed == [True]


def test_the_first_step_of_a_late_shape_does_not_wait_either():
    """Then parameters are moved to buckets: copies, which wait in the engine, not in Python."""
    ctx = contexts(2)
    net = runs.mlp(ctx, deferred=True)
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    [batch] = runs.batches((7,))
    runs.backward(net, batch, ctx)
    gate, passed = threading.Event(), []
    grad = net[0].weight.list_grad()[1]
    engine.push(lambda: passed.append(gate.wait(60)), ctx[1], writes=[grad])
    trainer.step(7)
    assert passed == []
    gate.set()
    assert_as_one(net, runs.stock(options={"learning_rate": 0.05}, data=[batch]))


ALONE = """
import gluonpar, mxnet as mx
from gluonpar.trainer import Trainer
mx.npx.set_np()
ctx = [mx.cpu(0), mx.cpu(1)]
net = mx.gluon.nn.Dense(2)
net.initialize(mx.init.One(), ctx=ctx)
net.hybridize(static_alloc=True, static_shape=True)
trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5, "momentum": 0.5})
for _ in range(3):
    with mx.autograd.record():
        losses = [net(mx.np.ones((1, 3), ctx=c)) for c in ctx]
    mx.autograd.backward(losses)
    trainer.step(2)
trainer.check_replicas()
w = net.weight.data(ctx[1])
assert type(w) is mx.np.ndarray and w.shape == (2, 3)
assert w.asnumpy().tolist() == [[1 - 0.5 - 0.75 - 0.875] * 3] * 2, w
"""


def test_a_process_in_the_numpy_world():
    """By hand: momentum halves, each step adds half a gradient of one."""
    process = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
