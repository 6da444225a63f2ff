"""kvstore='gluonpar': its Trainers are gluonpar's, its sums are right, and Module trains as one."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import gluonpar
from tests.support import gluon_runs as runs
from tests.support.contexts import contexts, device
from tests.support.gluon_runs import assert_as_one, give_grads, weights
from tests.support.ranks import training

CTX = contexts(8)
OPTIMIZERS = {
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}),
    # These change numbers of their own in each update.
    "nadam": ("nadam", {"learning_rate": 0.01}),
}


class Holder(mx.optimizer.Optimizer):
    """Holds another optimizer, and numbers in a dict, as those that exchange gradients do."""

    def __init__(self, inner):
        self.inner, self.numbers = inner, {"updates": 0}

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def create_state_multi_precision(self, index, weight):
        return self.inner.create_state_multi_precision(index, weight)

    def update_multi_precision(self, index, weight, grad, state):
        self.numbers["updates"] += 1
        self.inner.lr = 0.1 / self.numbers["updates"]
        self.inner.update_multi_precision(index, weight, grad, state)


class Overridden(gluon.Trainer):
    """Scales the sums, and notes what is called."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)
        self._step = self._grads = self._options = self._identity = self._scope = "its own"

    _rescale = _begun = _has_overflow = "its own, too"

    def halve(self):
        self.calls.append("_allreduce_grads")
        for param in self._params:
            for grad in param.list_grad():
                grad *= 0.5

    def _allreduce_grads(self):
        super()._allreduce_grads()
        self.halve()

    def _update(self, *args, **kwargs):
        self.calls.append("_update")
        super()._update(*args, **kwargs)


class OwnStep(Overridden):
    """A step that is written out, and sums parameter by parameter, as MXNet's own."""

    def step(self, batch_size, ignore_stale_grad=False):
        self._check_and_rescale_grad(self._scale / batch_size)
        if not self._kv_initialized:
            self._init_kvstore()
        if self._params_to_init:
            self._init_params()
        self._allreduce_grads()
        self._update(ignore_stale_grad)

    def _allreduce_grads(self):
        for i, param in enumerate(self._params):
            if self._kvstore:  # MXNet's Trainer has none for one device
                self._kvstore.pushpull(i, param.list_grad(), priority=-i)
        self.halve()


class OwnUpdate(Overridden):
    """An update of each device's copies by an updater of its own, as MXNet's."""

    def _update(self, ignore_stale_grad=False):
        self.calls.append("_update")
        for i, param in enumerate(self._params):
            copies = zip(self._updaters, param.list_data(), param.list_grad())
            for updater, value, grad in copies:
                updater(i, grad, value)


class Wrapped(gluon.Trainer):
    """Methods of the object, not of its class."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)
        own = {name: getattr(self, name) for name in ("_allreduce_grads", "_update")}
        self._allreduce_grads = lambda: own["_allreduce_grads"]() or Overridden.halve(self)
        self._update = lambda *args: self.calls.append("_update") or own["_update"](*args)


@pytest.mark.parametrize("kind", [Overridden, OwnStep, OwnUpdate, Wrapped])
@pytest.mark.parametrize("optimizer", ["momentum", "nadam", "holder"])
def test_a_subclass_is_gluonpars_trainer_and_its_methods_are_called(kind, optimizer):
    nets = []
    for k, kvstore in ((1, "device"), (3, "gluonpar")):
        net = runs.mlp(CTX[:k])
        name, options = OPTIMIZERS.get(optimizer, (optimizer, None))
        made = Holder(mx.optimizer.Adam()) if optimizer == "holder" else name
        given = net.collect_params(), made, options
        trainer = kind(*given, kvstore=kvstore, update_on_kvstore=False)
        runs.train(net, trainer, runs.batches(), CTX[:k])
        nets.append(net)
        assert isinstance(trainer, kind) and type(trainer).__name__ == kind.__name__
        assert isinstance(trainer, gluonpar.Trainer) == (k == 3)
        assert trainer.calls == ["_allreduce_grads", "_update"] * len(runs.SIZES)
    assert_as_one(nets[1], runs.values(nets[0]))


def test_arguments_and_attributes_are_those_of_stock():
    params = weights([[1.0], [2.0]], 2)
    store = mx.kv.create("gluonpar")
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.5}, store, None, False)
    assert type(trainer) is gluonpar.Trainer and trainer._kvstore is store
    trainer.set_learning_rate(0.25)
    assert (trainer.learning_rate, trainer.optimizer.lr) == (0.25, 0.25)
    give_grads(params, [[1.0, 2.0]] * 2)
    trainer.step(1)
    assert [w.asscalar() for param in params for w in param.list_data()] == [0.25, 0.25, 1.25, 1.25]
    assert len(trainer._updaters[0].states) == 2  # one state, not one for each device


class AdamW(mx.optimizer.Optimizer):
    """Leaves an update out if the scale is NaN or infinite, as GluonNLP's."""

    def create_state(self, index, weight):
        return mx.nd.zeros_like(weight), mx.nd.zeros_like(weight)

    def update(self, index, weight, grad, state):
        scale = mx.nd.full((1,), self.rescale_grad, ctx=weight.context)
        mx.nd.contrib.adamw_update(weight, grad, *state, scale, out=weight, lr=1, eta=0.1, wd=0)


@pytest.mark.parametrize("overflow", [float("nan"), float("inf"), np.float32("nan")])
def test_an_update_after_an_overflow_is_what_the_operator_makes_of_it(overflow):
    params = weights([[1.0]], 2)
    trainer = gluon.Trainer(params, AdamW(), kvstore="gluonpar")
    seen = []
    for batch_size in (4, overflow, 4):
        give_grads(params, [[1.0, 3.0]])
        trainer.allreduce_grads()
        trainer.update(batch_size)
        seen.append([value.asscalar() for value in params[0].list_data()])
    assert seen[0] == seen[1] != seen[2] and all(first == second for first, second in seen)


def whole(param, values):
    """Have backward give one value a device, plus the element's place: every cell differs."""
    places = np.arange(np.prod(param.shape)).reshape(param.shape)
    give_grads([param], [[places + value for value in values]])


def assert_summed(param, values):
    places = np.arange(np.prod(param.shape)).reshape(param.shape)
    for grad in param.list_grad():
        np.testing.assert_array_equal(grad.asnumpy(), len(values) * places + sum(values))


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


def test_a_value_is_pulled_until_a_sum_is_pushed(world):
    store, data = mx.kv.create("gluonpar"), place([[1, 2], [10, 20]], world)
    store.init(["a", 3], [data[0], world.array([5], ctx=device(0))])
    store.pull("a", data[1])
    assert numbers(data) == [[1, 2]] * 2
    out = world.zeros((1,), ctx=device(1))
    store.pull([3], [[out]])
    assert numbers([out]) == [[5]]
    data = place([[1, 2], [10, 20]], world)
    store.push("a", data)
    assert numbers(data) == [[1, 2], [10, 20]]
    store.pull("a", data)
    assert numbers(data) == [[11, 22]] * 2


def test_gradients_that_are_refused_are_not_marked_as_sums():
    params = weights([[1.0], [1.0]], 2)
    trainer = gluonpar.Trainer(params, "sgd")
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


def test_broadcast_from_among_the_arrays_and_from_outside(world):
    store = mx.kv.create("gluonpar")
    data = place([[1], [2], [3]], world)
    store.broadcast(0, data[1], data)
    assert numbers(data) == [[2]] * 3
    store.broadcast(0, world.array([7], ctx=device(0)), data)
    assert numbers(data) == [[7]] * 3
    store.broadcast([0, "b"], [data[0], world.array([5], ctx=device(3))], [data[1], data[2]])
    assert numbers(data) == [[7], [7], [5]]


MODULES = {**OPTIMIZERS, "adam": ("adam", {"lr_scheduler": mx.lr_scheduler.FactorScheduler(2)})}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Module reads its states from an open file
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("by_name", [True, False], ids=["name", "instance"])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_module_fit_trains_as_with_mxnets_own_store(tmp_path, by_name, k, optimizer):
    """The states are saved and loaded."""
    kvstore = "gluonpar" if by_name else mx.kv.create("gluonpar")
    mine, theirs = (
        training.by_module(k, store, tmp_path / "states", *MODULES[optimizer])
        for store in (kvstore, "device")
    )
    for value, want in zip(mine, theirs):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)


MEAN = {"rescale_grad": 1 / training.MODULE_BATCH}


class Own(mx.optimizer.SGD):
    """No optimizer of MXNet's."""


@pytest.mark.parametrize(
    "optimizer, name",
    [
        *((name, name) for name in ("LARS", "LBSGD", "NAG", "Nadam", "SGLD")),
        (Own(**MEAN), "Own"),
        (mx.optimizer.SGD(lr_scheduler=lambda number: 0.1, **MEAN), "function"),
    ],
)
def test_module_is_refused_what_might_update_the_copies_differently(optimizer, name):
    with pytest.raises(ValueError, match=f"{name} might .*gluonpar.Trainer"):
        training.by_module(2, optimizer=optimizer, options={})
    training.by_module(1, optimizer=optimizer, options={})


@pytest.mark.filterwarnings("ignore:.*FeedForward has been deprecated:DeprecationWarning")
def test_feed_forward_is_refused():
    out = mx.sym.SoftmaxOutput(mx.sym.var("data"), name="softmax")
    model = mx.model.FeedForward(out, CTX[:2], num_epoch=1)
    with pytest.raises(ValueError, match="use mx.mod.Module"):
        model.fit(np.ones((4, 2)), np.zeros(4), kvstore="gluonpar")


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda store: store.set_optimizer(mx.optimizer.Adam()), "update_on_kvstore=False"),
        (lambda store: store._set_updater(print), "no _set_updater"),
        (lambda store: store.set_gradient_compression({}), "compression='fp16'"),
        (lambda store: store._updater, "no _updater"),
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
    """Module initialises sparse weights, too."""
    value = mx.nd.ones((3, 2)).tostype("row_sparse")
    mx.kv.create("gluonpar").init("weight", value)
    np.testing.assert_array_equal(value.asnumpy(), np.ones((3, 2)))
