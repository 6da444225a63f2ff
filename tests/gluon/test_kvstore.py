"""kvstore: Trainer and Module train as with MXNet's own store, and no sum is ever lost."""

import functools

import cluster_rank
import gluon_runs as runs
import mxnet as mx
import numpy as np
import pytest
from contexts import contexts, device
from gluon_runs import assert_as_one, give_grads, weights
from mxnet import autograd, gluon
from processes import run_python

from gluonpar.runtime import engine

CTX = contexts(8)
OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": 0.1}),
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}),
    "adam": ("adam", {"learning_rate": 0.01}),
    # These change numbers of their own in each update.
    "nadam": ("nadam", {"learning_rate": 0.01}),
    "lars": ("lars", {"momentum": 0.9, "lr_scheduler": lambda number: 0.5**number}),
}


def make_trainer(params, optimizer="sgd", kvstore="gluonpar", **more):
    name, options = OPTIMIZERS[optimizer]
    return gluon.Trainer(params, name, dict(options), kvstore=kvstore, **more)


def trained(k, make=runs.mlp, **how):
    net = make(CTX[:k])
    runs.train(net, make_trainer(net.collect_params(), **how), runs.batches(), CTX[:k])
    return net


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_k_devices_train_as_one(world, optimizer, k):
    make = functools.partial(runs.mlp, deferred=True)
    net = trained(k, make, optimizer=optimizer)
    assert_as_one(net, runs.stock(*OPTIMIZERS[optimizer], make))
    assert type(net[0].weight.data(CTX[k - 1])) is type(world.ones((1,)))


def whole(param, values):
    """Have backward give one value a device, plus the element's place: every cell differs."""
    places = np.arange(np.prod(param.shape)).reshape(param.shape)
    give_grads([param], [[places + value for value in values]])


def assert_summed(param, values):
    places = np.arange(np.prod(param.shape)).reshape(param.shape)
    for grad in param.list_grad():
        np.testing.assert_array_equal(grad.asnumpy(), len(values) * places + sum(values))


def test_gradients_of_all_dtypes_are_exact_sums_between_allreduce_grads_and_update():
    dtypes, values = ["float32", "float16", "float64", "float32"], (100, 10, 1)
    params = [weights([np.ones((2, 5))], 3, dtype=dtype)[0] for dtype in dtypes]
    options = {"learning_rate": 0.1, "multi_precision": True}
    trainer = gluon.Trainer(params, "sgd", options, kvstore="gluonpar")
    for _ in range(2):
        for param in params:
            whole(param, values)
        trainer.allreduce_grads()
        for param in params:
            assert_summed(param, values)
            for grad in param.list_grad():
                grad[:] = 8  # as clipping would
        trainer.update(4)
    for param in params:
        for value in param.list_data():
            np.testing.assert_allclose(value.asnumpy(), 1 - 2 * 0.1 * 8 / 4, rtol=1e-3)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgld", "lbsgd"])
def test_optimizers_that_would_update_the_copies_differently_may_update_one_device(optimizer, k):
    params = weights([[1.0]], k)
    trainer = gluon.Trainer(params, optimizer, kvstore=mx.kv.create("gluonpar"))
    give_grads(params, [[1.0, 2.0]])
    before = runs.bits(params)
    if k == 1:
        trainer.step(8)
    else:
        with pytest.raises(ValueError, match="gluonpar.Trainer"):
            trainer.step(8)
    assert (runs.bits(params) == before) == (k == 2)


def test_states_go_on_on_other_devices(tmp_path):
    """Those of the end have taken part in no step, in the first, and in all."""
    net = runs.mlp(CTX[:1])
    where = [CTX[1:3], CTX[2:4], CTX[2:4], CTX[:3], CTX[:3]]
    for i, (batch, ctx) in enumerate(zip(runs.batches(), where)):
        net.collect_params().reset_ctx(ctx)
        trainer = make_trainer(net.collect_params(), "adam")
        if i:
            trainer.load_states(str(tmp_path / "states"))
        runs.train(net, trainer, [batch], ctx)
        trainer.save_states(str(tmp_path / "states"))
    assert_as_one(net, runs.stock(*OPTIMIZERS["adam"]))


def test_one_store_for_two_trainers():
    """Their keys are the same numbers, their arrays are not."""
    ctx, store = CTX[:2], mx.kv.create("gluonpar")
    makes = (runs.mlp, functools.partial(runs.mlp, bias=False))
    nets = [make(ctx) for make in makes]
    trainers = [make_trainer(net.collect_params(), kvstore=store) for net in nets]
    for batch in runs.batches():
        for net, trainer in zip(nets, trainers):
            runs.train(net, trainer, [batch], ctx)
    for net, make in zip(nets, makes):
        assert_as_one(net, runs.stock(*OPTIMIZERS["sgd"], make))


def test_a_parameter_that_no_device_used_is_not_updated():
    """Not even decayed."""
    params = weights([[1.0], [1.0]], 2)
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 1, "wd": 0.5}, kvstore="gluonpar")
    give_grads(params[:1], [[2.0, 4.0]])
    trainer.step(1, ignore_stale_grad=True)
    for used, unused in zip(*(param.list_data() for param in params)):
        assert (used.asscalar(), unused.asscalar()) == (1 - 6 - 0.5, 1)


@pytest.mark.cpu("the operator is that of 'host', for CPU contexts")
def test_the_stock_loop_is_summed_in_one_operator(monkeypatch):
    net, names, prepare = trained(2), [], engine.prepare
    trainer = make_trainer(net.collect_params())
    runs.train(net, trainer, runs.batches((8,)), CTX[:2])

    def noted(*args, name, **how):
        names.append(name)
        return prepare(*args, name=name, **how)

    monkeypatch.setattr(engine, "prepare", noted)
    runs.train(net, trainer, runs.batches((8, 8)), CTX[:2])
    assert names.count("gluonpar.host") == 2


def place(values, world=mx.nd):
    return [world.array(value, ctx=c) for value, c in zip(values, CTX)]


def numbers(arrays):
    return [array.asnumpy().tolist() for array in arrays]


def test_pushpull_in_place_elsewhere_and_for_several_keys(world):
    store = mx.kv.create("GluonPar")
    data = place([[1, 2], [10, 20]], world)
    elsewhere = place([[0, 0]] * 3, world)
    store.pushpull("a", data, out=elsewhere)
    assert numbers(elsewhere) == [[11, 22]] * 3
    assert numbers(data) == [[1, 2], [10, 20]]
    store.pushpull("a", data, out=data[1])
    assert numbers(data) == [[1, 2], [11, 22]]
    store.pushpull("a", data, out=data)
    assert numbers(data) == [[12, 24]] * 2
    other = place([[[1]], [[3]]], world)
    for key in (["a", 3], ("a", 3)):
        store.pushpull(key, [data, other])
    assert numbers(data) == [[48, 96]] * 2
    assert numbers(other) == [[[8]]] * 2
    store.pushpull("one", data[0])
    assert numbers(data) == [[48, 96]] * 2


def test_a_sum_that_was_pushed_is_pulled(world):
    store, data = mx.kv.create("gluonpar"), place([[1, 2], [10, 20]], world)
    store.push("a", data)
    assert numbers(data) == [[1, 2], [10, 20]]
    store.pull("a", data)
    assert numbers(data) == [[11, 22]] * 2


def test_gradients_that_are_refused_are_not_marked_as_sums():
    params = weights([[1.0], [1.0]], 2)
    trainer = make_trainer(params)
    for param in params:
        whole(param, (1, 2))
    first, second = (param.list_grad() for param in params)
    store = mx.kv.create("gluonpar")
    for lists in ([first, first], [first, second[:1]], [first, []], [first, 7]):
        with pytest.raises((ValueError, TypeError)):
            store.pushpull([0, 1], lists)
    trainer.allreduce_grads()
    for param in params:
        assert_summed(param, (1, 2))


def test_threads_are_shared_out_before_the_first_forward():
    """By the first step, operators that are queued would have had those of before, or not."""
    used = run_python(
        """import gluonpar, mxnet as mx
from gluonpar.runtime import threads
threads.limit(12)
ctx = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
param = mx.gluon.Parameter("w", shape=(1,))
param.initialize(ctx=ctx)
mx.gluon.Trainer([param], "sgd", kvstore="gluonpar")
print(threads.describe(ctx))""",
        OMP_NUM_THREADS=None,
        MXNET_OMP_MAX_THREADS=None,
    )
    assert used == "4 threads each, of 12 processors\n"


def test_broadcast_from_among_the_arrays_and_from_outside(world):
    store = mx.kv.create("gluonpar")
    data = place([[1], [2], [3]], world)
    store.broadcast(0, data[1], data)
    assert numbers(data) == [[2]] * 3
    store.broadcast(0, world.array([7], ctx=device(0)), data)
    assert numbers(data) == [[7]] * 3
    store.broadcast([0, "b"], [data[0], world.array([5], ctx=device(3))], [data[1], data[2]])
    assert numbers(data) == [[7], [7], [5]]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Module reads its states from an open file
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("by_name", [True, False], ids=["name", "instance"])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["momentum", "nadam"])
def test_module_fit_trains_as_with_mxnets_own_store(tmp_path, by_name, k, optimizer):
    """The states are saved and loaded."""
    kvstore = "gluonpar" if by_name else mx.kv.create("gluonpar")
    mine, theirs = (
        cluster_rank.by_module(k, store, tmp_path / "states", *OPTIMIZERS[optimizer])
        for store in (kvstore, "device")
    )
    for value, want in zip(mine, theirs):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)


def test_module_is_refused_an_optimizer_that_would_update_the_copies_differently():
    with pytest.raises(ValueError, match="SGLD.*gluonpar.Trainer"):
        cluster_rank.by_module(2, optimizer="sgld", options={})


@pytest.mark.filterwarnings("ignore:.*FeedForward has been deprecated:DeprecationWarning")
def test_feed_forward_is_refused():
    out = mx.sym.SoftmaxOutput(mx.sym.var("data"), name="softmax")
    model = mx.model.FeedForward(out, CTX[:2], num_epoch=1)
    with pytest.raises(ValueError, match="use mx.mod.Module"):
        model.fit(np.ones((4, 2)), np.zeros(4), kvstore="gluonpar")


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"update_on_kvstore": True}, ValueError, "Please set update_on_kvstore=False.*GluonPar"),
        ({"compression_params": {"type": "2bit"}}, Exception, "compression is not supported"),
        ({}, AssertionError, "sparse weight requires optimizer support"),
    ],
)
def test_trainers_that_need_another_store_are_refused(options, error, words):
    net = runs.mlp(CTX[:2]) if options else gluon.contrib.nn.SparseEmbedding(5, 2)
    net.initialize(ctx=CTX[:2], force_reinit=True)
    with pytest.raises(error, match=words):
        make_trainer(net.collect_params(), **options).step(1)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda store: store.set_optimizer(mx.optimizer.Adam()), "update_on_kvstore=False"),
        (lambda store: store.save_optimizer_states("f.states"), "no optimizer states"),
        (lambda store: store.pull("w", mx.nd.ones(1)), "'w'"),
        (lambda store: store.pushpull([1, 2], [[mx.nd.ones(1)]]), "value must .*got 1 for keys"),
        (lambda store: store.broadcast([1], [mx.nd.ones(1)], []), "out must .*got 0 for keys"),
        (lambda store: store.pushpull(0, [mx.nd.ones(1), mx.nd.ones(2)]), r"shape \(2,\)"),
    ],
)
def test_unsupported_calls_are_refused(call, words):
    with pytest.raises((ValueError, AttributeError, KeyError), match=words):
        call(mx.kv.create("gluonpar"))


def test_nothing_is_recorded():
    """Summing under autograd.record() changes values, not the graph."""
    store, weight = mx.kv.create("gluonpar"), mx.nd.ones(1)
    weight.attach_grad()
    with autograd.record():
        products = [weight * 2, weight * 3]
        store.pushpull(0, products, out=products)
        loss = products[0] + products[1]
    loss.backward()
    assert numbers(products) == [[5], [5]]
    assert weight.grad.asscalar() == 5


def test_one_process_initialises_weights_of_any_storage():
    """Module initialises sparse weights, too, of which nothing is sent."""
    value = mx.nd.ones((3, 2)).tostype("row_sparse")
    mx.kv.create("gluonpar").init("weight", value)
    np.testing.assert_array_equal(value.asnumpy(), np.ones((3, 2)))
