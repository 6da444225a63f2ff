"""kvstore: Trainer and Module train as with MXNet's own store, and no sum is ever lost."""

import mxnet as mx
import numpy as np
import pytest
from contexts import contexts, device
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluonpar
import gluonpar.gluon.kvstore
from gluonpar.runtime import engine

CTX = contexts(8)
OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": 0.1}),
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}),
    "adam": ("adam", {"learning_rate": 0.01}),
}


def network(ctx, **more):
    """Two layers, equal for equal calls; without ``in_units`` the first waits for a batch."""
    mx.random.seed(7)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(6, activation="tanh", **more))
        net.add(nn.Dense(3, in_units=6))
    net.initialize(mx.init.Normal(0.5), ctx=ctx)
    return net


def batches(sizes=(8, 5, 7, 8, 6), seed=0):
    """Sizes that most numbers of devices do not divide."""
    rng = np.random.default_rng(seed)
    for n in sizes:
        yield rng.normal(size=(n, 4)).astype("float32"), rng.integers(0, 3, n).astype("float32")


def backward(net, X, y, ctx):
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    shards = gluonpar.split_and_load((X, y), ctx)
    with autograd.record():
        losses = [loss(net(X_shard), y_shard) for X_shard, y_shard in shards]
    autograd.backward(losses)


def make_trainer(net, optimizer="sgd", kvstore="gluonpar", **more):
    name, options = OPTIMIZERS[optimizer]
    return gluon.Trainer(net.collect_params(), name, dict(options), kvstore=kvstore, **more)


def train(net, trainer, ctx, data=None, **options):
    for X, y in batches() if data is None else data:
        backward(net, X, y, ctx)
        trainer.step(len(X), **options)


def replicas(net):
    """Of every parameter, the copies of all devices."""
    params = net.collect_params().values()
    return [[copy.asnumpy() for copy in param.list_data()] for param in params]


def assert_identical(net):
    for copies in replicas(net):
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])


def assert_equal(net, other, rtol=1e-6):
    """``rtol`` also of a parameter's largest element: small ones are differences of larger ones."""
    for mine, theirs in zip(replicas(net), replicas(other)):
        scale = np.abs(theirs[0]).max()
        np.testing.assert_allclose(mine[0], theirs[0], rtol=rtol, atol=rtol * scale)


def assert_moved(net, ctx):
    start = network(ctx)
    backward(start, *next(batches()), ctx)  # which makes the deferred parameters
    for now, before in zip(replicas(net), replicas(start)):
        assert np.all(np.any(now[0] != before[0], axis=-1)), now[0].shape


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_with_mxnets_own_store(world, optimizer, k):
    ctx, nets = CTX[:k], {}
    for kvstore in ("gluonpar", "device"):
        nets[kvstore] = network(ctx)
        train(nets[kvstore], make_trainer(nets[kvstore], optimizer, kvstore), ctx)
    assert_identical(nets["gluonpar"])
    assert_equal(nets["gluonpar"], nets["device"])
    assert_moved(nets["gluonpar"], ctx)


def whole(param, values):
    """Fill the gradients, one value a device, plus the element's place: every cell differs."""
    for grad, value in zip(param.list_grad(), values):
        grad[:] = mx.nd.arange(grad.size).reshape(grad.shape).as_in_context(grad.context) + value


def assert_summed(param, values):
    places = np.arange(np.prod(param.shape)).reshape(param.shape)
    for grad in param.list_grad():
        np.testing.assert_array_equal(grad.asnumpy(), len(values) * places + sum(values))


def test_gradients_are_exact_sums_between_allreduce_grads_and_update():
    ctx, values = CTX[:3], (100, 10, 1)
    net = network(ctx, in_units=4)
    trainer = make_trainer(net)
    for _ in range(2):
        backward(net, *next(batches()), ctx)
        for param in net.collect_params().values():
            whole(param, values)
        trainer.allreduce_grads()
        for param in net.collect_params().values():
            assert_summed(param, values)
    before = replicas(net)
    for param in net.collect_params().values():
        for grad in param.list_grad():
            grad[:] = 8  # as clipping would
    trainer.update(4)
    for old, new in zip(before, replicas(net)):
        np.testing.assert_allclose(new, np.array(old) - np.float32(0.1 * 8 / 4), rtol=1e-6)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_frozen_layer_is_left_alone_be_it_the_first_or_the_last(layer):
    ctx = CTX[:2]
    net = network(ctx, in_units=4)
    net[layer].collect_params().setattr("grad_req", "null")
    before = replicas(net)
    train(net, make_trainer(net), ctx)
    frozen = [np.array_equal(old, new) for old, new in zip(before, replicas(net))]
    assert frozen == [layer == 0, layer == 0, layer == 1, layer == 1]
    assert_identical(net)


def test_gradients_that_are_added_up_are_summed_once():
    """grad_req='add': two half batches a step are as good as one whole."""
    ctx, nets = CTX[:2], {}
    for grad_req in ("write", "add"):
        net = nets[grad_req] = network(ctx, in_units=4)
        net.collect_params().setattr("grad_req", grad_req)
        trainer = make_trainer(net, "momentum")
        for X, y in batches((8, 8, 8)):
            net.collect_params().zero_grad()
            for half in (slice(0, 4), slice(4, 8)) if grad_req == "add" else (slice(0, 8),):
                backward(net, X[half], y[half], ctx)
            trainer.step(8)
    assert_identical(nets["add"])
    assert_equal(nets["add"], nets["write"], rtol=1e-5)


def test_float16_beside_float32_with_a_master_copy():
    ctx, nets = CTX[:2], {}
    for kvstore in ("gluonpar", "device"):
        params = nets[kvstore] = gluon.ParameterDict()
        half = params.get("half", shape=(3, 4), dtype="float16", init="ones")
        full = params.get("full", shape=(3, 4), init="ones")
        params.initialize(ctx=ctx)
        options = {"learning_rate": 0.01, "momentum": 0.9, "multi_precision": True}
        trainer = gluon.Trainer(params, "sgd", options, kvstore=kvstore)
        for X, _ in batches((6,) * 5):
            with autograd.record():
                losses = [
                    (half.data(c).astype("float32") * full.data(c) * x).tanh().sum()
                    for x, c in zip(gluonpar.split_and_load(X, ctx), ctx)
                ]
            autograd.backward(losses)
            trainer.step(1)
    for name, tolerance in (("half", 2**-10), ("full", 1e-3)):  # 2**-10: one step of float16
        mine, other = (nets[kvstore].get(name).list_data() for kvstore in ("gluonpar", "device"))
        assert str(mine[0].dtype.__name__) == {"half": "float16", "full": "float32"}[name]
        np.testing.assert_array_equal(mine[0].asnumpy(), mine[1].asnumpy())
        np.testing.assert_allclose(mine[0].asnumpy(), other[0].asnumpy(), rtol=tolerance)
        assert np.all(mine[0].asnumpy() != 1)


def test_one_context_by_name_and_by_instance_trains_as_without_a_store():
    nets = []
    for kvstore in (None, "gluonpar", mx.kv.create("gluonpar")):
        nets.append(network(CTX[:1]))
        train(nets[-1], make_trainer(nets[-1], "adam", kvstore), CTX[:1])
    for net in nets[1:]:
        np.testing.assert_equal(replicas(net), replicas(nets[0]))


@pytest.mark.parametrize("optimizer", ["nadam", "sgld", "lbsgd"])
def test_optimizers_that_would_update_the_copies_differently_are_refused(optimizer):
    net = network(CTX[:2], in_units=4)
    trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore="gluonpar")
    backward(net, *next(batches()), CTX[:2])
    before = replicas(net)
    with pytest.raises(ValueError, match="gluonpar.Trainer"):
        trainer.step(8)
    np.testing.assert_equal(replicas(net), before)


def test_one_store_for_two_trainers():
    """Their keys are the same numbers, their arrays are not."""
    ctx, store = CTX[:2], mx.kv.create("gluonpar")
    shapes = ({"in_units": 4}, {"in_units": 4, "use_bias": False})
    together = [network(ctx, **more) for more in shapes]
    trainers = [make_trainer(net, kvstore=store) for net in together]
    for X, y in batches():
        for net, trainer in zip(together, trainers):
            train(net, trainer, ctx, [(X, y)])
    for net, more in zip(together, shapes):
        alone = network(ctx, **more)
        train(alone, make_trainer(alone, kvstore="device"), ctx)
        assert_identical(net)
        assert_equal(net, alone)


def test_a_part_of_the_network_that_is_not_used_is_skipped_on_every_device():
    ctx, nets = CTX[:2], {}
    for kvstore in ("gluonpar", "device"):
        net = network(ctx, in_units=4)
        unused = nn.Dense(2, in_units=2)
        unused.initialize(mx.init.One(), ctx=ctx)
        net.register_child(unused)
        trainer = make_trainer(net, kvstore=kvstore, update_on_kvstore=False)
        net._children.popitem()
        backward(net, *next(batches()), ctx)
        with pytest.raises(UserWarning, match="has not been updated by backward"):
            trainer.step(8)
        trainer.step(8, ignore_stale_grad=True)
        train(net, trainer, ctx, ignore_stale_grad=True)
        np.testing.assert_equal(replicas(unused)[0], [np.ones((2, 2))] * 2)
        nets[kvstore] = net
    assert_identical(nets["gluonpar"])
    assert_equal(nets["gluonpar"], nets["device"])


def test_new_gradient_arrays_are_found():
    """Initializing again, another number of devices: the store must not sum what was there."""
    ctx = CTX[:2]
    net = network(ctx, in_units=4)
    trainer = make_trainer(net)
    train(net, trainer, ctx)
    net.collect_params().setattr("grad_req", "null")
    net.collect_params().setattr("grad_req", "write")
    backward(net, *next(batches()), ctx)
    for param in net.collect_params().values():
        whole(param, (5, 7))
    trainer.allreduce_grads()
    for param in net.collect_params().values():
        assert_summed(param, (5, 7))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_training_continues_from_saved_states(tmp_path, optimizer):
    ctx = CTX[:2]
    first, second = list(batches()), list(batches(seed=1))
    through = network(ctx)
    trainer = make_trainer(through, optimizer)
    train(through, trainer, ctx, first)
    trainer.save_states(str(tmp_path / "states"))
    through.save_parameters(str(tmp_path / "params"))
    train(through, trainer, ctx, second)

    resumed = network(ctx, in_units=4)
    resumed.load_parameters(str(tmp_path / "params"), ctx=ctx)
    trainer = make_trainer(resumed, optimizer)
    trainer.load_states(str(tmp_path / "states"))
    train(resumed, trainer, ctx, second)
    np.testing.assert_equal(replicas(resumed), replicas(through))


@pytest.mark.cpu("the operator is that of 'host', for CPU contexts")
def test_the_stock_loop_is_summed_in_one_operator(monkeypatch):
    ctx = CTX[:2]
    net = network(ctx)
    trainer = make_trainer(net)
    train(net, trainer, ctx, batches((8,)))
    names, prepare = [], engine.prepare
    monkeypatch.setattr(
        engine,
        "prepare",
        lambda *a, name, **how: names.append(name) or prepare(*a, name=name, **how),
    )
    train(net, trainer, ctx, batches((8, 8)))
    assert names.count("gluonpar.host") == 2
    assert_identical(net)


class OwnLoop(gluon.Trainer):
    """A loop that skips the first parameter."""

    def _allreduce_grads(self):
        for i in (3, 1, 2):
            self._kvstore.pushpull(i, self._params[i].list_grad(), priority=-i)


class AroundTheStore(gluonpar.gluon.kvstore.GluonPar):
    """The caller of the store is not the Trainer."""

    def pushpull(self, key, value, out=None, priority=0):
        super().pushpull(key, value, out, priority)


@pytest.mark.parametrize(
    "make, summed",
    [
        (lambda params: OwnLoop(params, "sgd", kvstore="gluonpar"), [1, 2, 3]),
        (lambda params: gluon.Trainer(params, "sgd", kvstore=AroundTheStore()), [0, 1, 2, 3]),
    ],
    ids=["own loop", "own store"],
)
def test_callers_other_than_the_stock_loop_get_the_sums_of_their_keys(make, summed):
    net = network(CTX[:2], in_units=4)
    trainer = make(net.collect_params())
    for _ in range(2):
        for j, param in enumerate(trainer._params):
            whole(param, (j, 50))
        trainer.allreduce_grads()
        for j in summed:
            assert_summed(trainer._params[j], (j, 50))
        for j in {0, 1, 2, 3} - set(summed):
            assert [grad.asnumpy().flat[0] for grad in trainer._params[j].list_grad()] == [j, 50]


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


def test_a_list_that_the_caller_changes_later_was_summed_as_given():
    store = mx.kv.create("gluonpar")
    data, later = place([[1], [2]]), place([[4], [8]])
    given = list(data)
    store.pushpull(0, given)
    given[:] = later
    store.pushpull(0, data)
    assert numbers(data) == [[6]] * 2 and numbers(later) == [[4], [8]]


def test_arrays_without_elements():
    with mx.util.np_shape(True):
        store = mx.kv.create("gluonpar")
        empty, full = [mx.nd.zeros((0, 2), ctx=c) for c in CTX[:2]], place([[1], [2]])
        for total in (3, 6, 12):
            store.pushpull([0, 1], [empty, full])
            assert numbers(full) == [[total]] * 2
            assert numbers(empty) == [[]] * 2


def test_broadcast_from_among_the_arrays_and_from_outside(world):
    store = mx.kv.create("gluonpar")
    data = place([[1], [2], [3]], world)
    store.broadcast(0, data[1], data)
    assert numbers(data) == [[2]] * 3
    store.broadcast(0, world.array([7], ctx=device(0)), data)
    assert numbers(data) == [[7]] * 3
    store.broadcast([0, "b"], [data[0], world.array([5], ctx=device(3))], [data[1], data[2]])
    assert numbers(data) == [[7], [7], [5]]


def test_type_rank_and_capabilities():
    store = mx.kv.create("gluonpar")
    assert (store.type, store.rank, store.num_workers) == ("gluonpar", 0, 1)
    assert isinstance(store, gluonpar.gluon.kvstore.GluonPar)
    assert store.is_capable("optimizer") is False
    with pytest.raises(ValueError, match="got 'telepathy'"):
        store.is_capable("telepathy")


def fit(kvstore, ctx, states=None):
    data, out = mx.sym.var("data"), mx.sym.var("softmax_label")
    hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=5, name="a"), "tanh")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=3, name="b"), out)
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 3, 24)
    train_iter = mx.io.NDArrayIter(rng.normal(size=(24, 4)).astype("float32"), labels, 8)
    start = {
        name: mx.nd.array(rng.normal(size=shape))
        for name, shape in (
            ("a_weight", (5, 4)),
            ("a_bias", (5,)),
            ("b_weight", (3, 5)),
            ("b_bias", (3,)),
        )
    }
    module = mx.mod.Module(symbol, context=ctx)
    module.fit(
        train_iter,
        num_epoch=2,
        kvstore=kvstore,
        optimizer="sgd",
        optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
        arg_params=start,
        aux_params={},
    )
    if states:
        module.save_optimizer_states(str(states))
        module.load_optimizer_states(str(states))
    moved = {name: value.asnumpy() for name, value in module.get_params()[0].items()}
    return moved, {name: value.asnumpy() for name, value in start.items()}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Module reads its states from an open file
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("by_name", [True, False], ids=["name", "instance"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_module_fit_trains_as_with_mxnets_own_store(tmp_path, by_name, k):
    kvstore = "gluonpar" if by_name else mx.kv.create("gluonpar")
    mine, start = fit(kvstore, CTX[:k], tmp_path / "states")
    theirs, _ = fit("device", CTX[:k])
    assert sorted(mine) == ["a_bias", "a_weight", "b_bias", "b_weight"]
    for name, value in mine.items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-5, atol=1e-6)
        assert np.all(value != start[name])


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"update_on_kvstore": True}, ValueError, "Please set update_on_kvstore=False.*GluonPar"),
        (
            {"compression_params": {"type": "2bit", "threshold": 0.5}},
            ValueError,
            "2bit.*does not compress.*kvstore='device'",
        ),
        ({}, AssertionError, "sparse weight requires optimizer support"),
    ],
)
def test_trainers_that_need_another_store_are_refused(options, error, words):
    net = network(CTX[:2], in_units=4) if options else gluon.contrib.nn.SparseEmbedding(5, 2)
    net.initialize(ctx=CTX[:2], force_reinit=True)
    with pytest.raises(error, match=words):
        make_trainer(net, **options).step(1)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda store: store.set_optimizer(mx.optimizer.Adam()), "Adam.*update_on_kvstore=False"),
        (lambda store: store.save_optimizer_states("f.states"), "'f.states'.*trainer.save_states"),
        (lambda store: store.load_optimizer_states("f.states"), "trainer.load_states"),
        (lambda store: store.push(3, mx.nd.ones(1)), r"push\(3\).*row_sparse.*pushpull"),
        (lambda store: store.pull("w", mx.nd.ones(1), ignore_sparse=False), r"pull\('w'\)"),
        (lambda store: store.row_sparse_pull(1, out=None, row_ids=None), r"row_sparse_pull\(1\)"),
        (lambda store: store.pushpull([1, 2], [[mx.nd.ones(1)]]), "value must .*got 1 for keys"),
        (lambda store: store.broadcast([1], [mx.nd.ones(1)], []), "out must .*got 0 for keys"),
        (lambda store: store.pushpull(0, [mx.nd.ones(1), mx.nd.ones(2)]), r"shape \(2,\)"),
    ],
)
def test_unsupported_calls_are_refused_with_a_remedy(call, words):
    with pytest.raises(ValueError, match=words):
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


@pytest.fixture
def d2l():
    """The book's companion, as it is; its plots go nowhere."""
    matplotlib = pytest.importorskip("matplotlib", reason="d2l plots with matplotlib")
    backend = matplotlib.get_backend()
    matplotlib.use("Agg")
    yield pytest.importorskip("d2l.mxnet", reason="needs: pip install --no-deps d2l==1.0.3")
    matplotlib.pyplot.close("all")
    matplotlib.use(backend)


def train_by_the_book(d2l, kvstore, ctx):
    """Two epochs of five batches of eight images."""
    mx.random.seed(1)
    net = nn.Sequential()
    net.add(nn.Conv2D(4, 3, activation="relu"), nn.AvgPool2D(2, 2), nn.Dense(10))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    rng = np.random.default_rng(0)
    X = mx.np.array(rng.normal(size=(40, 1, 10, 10)).astype("float32"))
    y = mx.np.array(rng.integers(0, 10, 40).astype("float32"))
    data_iter = gluon.data.DataLoader(gluon.data.ArrayDataset(X, y), batch_size=8)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, kvstore=kvstore)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    d2l.train_ch13(net, data_iter, data_iter, loss, trainer, 2, ctx, d2l.split_batch)
    return net


@pytest.mark.parametrize("world", ["mx.np"], indirect=True)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_books_training_on_eight_devices_gives_what_one_gives(world, d2l):
    """Without batch normalization, whose statistics are per device."""
    eight = train_by_the_book(d2l, "gluonpar", CTX)
    one = train_by_the_book(d2l, "device", CTX[:1])
    assert_identical(eight)
    assert_equal(eight, one, rtol=1e-4)  # ten steps, each adding in another order
