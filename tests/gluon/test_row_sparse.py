"""row_sparse gradients: the sum has the union of the rows, and Trainers update as MXNet's does."""

import functools

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.optimizer import LARS, SGD, Adam, Nadam

import gluonpar
from gluonpar.gluon.trainer import Trainer
from tests.support import gluon_runs as runs
from tests.support.contexts import contexts

ROWS, WIDTH = 12, 3


def row_sparse(ctx, dtype="float32", seed=0):
    """One array per device, with other rows each; the second device has none."""
    rng = np.random.RandomState(seed)
    data = []
    for k, c in enumerate(ctx):
        rows = sorted(rng.choice(ROWS, 0 if k == 1 else rng.randint(1, 6), replace=False))
        values = rng.normal(0, 10, (len(rows), WIDTH)).astype(dtype)
        empty = mx.nd.sparse.zeros("row_sparse", (ROWS, WIDTH), c, dtype)
        full = (values, rows), (ROWS, WIDTH)
        data.append(mx.nd.sparse.row_sparse_array(*full, c, dtype) if rows else empty)
    return data


def rows_of(array):
    return array.indices.asnumpy().tolist()


def summed_by_mxnet(data):
    store, results = mx.kv.create("device"), [array.copy() for array in data]
    store.init("w", mx.nd.zeros((ROWS, WIDTH), dtype=data[0].dtype))
    store.push("w", data)
    store.pull("w", out=results, ignore_sparse=False)
    return results


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_the_sum_has_the_rows_of_all_and_the_bits_of_mxnets_kvstore(k, dtype):
    ctx = contexts(k)
    data = row_sparse(ctx, dtype)
    want, union = summed_by_mxnet(data)[0], sorted({row for a in data for row in rows_of(a)})
    assert k == 1 or gluonpar.explain(data).algorithm == "row_sparse"
    gluonpar.allreduce(data)
    for array, c in zip(data, ctx):
        assert (array.stype, array.context, rows_of(array)) == ("row_sparse", c, union)
        assert array.asnumpy().tobytes() == want.asnumpy().tobytes()


@pytest.mark.parametrize(("dtype", "value"), [("float16", 60000), ("float32", 3e38)])
def test_the_mean_of_large_rows_does_not_overflow(dtype, value):
    data = row_sparse(contexts(3), dtype)
    for array in data:
        full = (np.full((2, WIDTH), value, dtype), [1, 3]), (ROWS, WIDTH)
        mx.nd.sparse.row_sparse_array(*full, array.context, dtype).copyto(array)
    gluonpar.allreduce(data, op="mean")
    for array in data:
        assert rows_of(array) == [1, 3]
        np.testing.assert_allclose(array.data.asnumpy(), full[0][0], rtol=1e-6)


def test_dense_and_row_sparse_lists_together():
    sparse, dense = row_sparse(contexts(2)), [mx.nd.ones((2,), ctx=c) for c in contexts(2)]
    want = sum(array.asnumpy() for array in sparse)
    gluonpar.collectives.allreduce_many([dense, sparse, [array + 1 for array in dense]])
    np.testing.assert_array_equal(sparse[1].asnumpy(), want)
    assert dense[1].asnumpy().tolist() == [2, 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "ring"}, "algorithm='ring'.*tostype"),
        ({"op": "max"}, "'sum' or 'mean' .*op='max'.*tostype"),
    ],
)
def test_what_is_not_done_with_rows_is_refused_and_nothing_changes(options, words):
    data = row_sparse(contexts(2))
    before = [array.asnumpy() for array in data]
    with pytest.raises(ValueError, match=words):
        gluonpar.allreduce(data, **options)
    np.testing.assert_array_equal([array.asnumpy() for array in data], before)


class Bag(nn.HybridBlock):
    """Embeddings of a few words each, and a dense layer after their mean."""

    def __init__(self):
        super().__init__(prefix="bag_")
        with self.name_scope():
            # A Trainer sorts by name: the first parameter has a sparse gradient.
            self.embed = nn.Embedding(ROWS, WIDTH, sparse_grad=True, prefix="a_embedding_")
            self.dense = nn.Dense(2, in_units=WIDTH)

    def hybrid_forward(self, F, words):
        return self.dense(self.embed(words).mean(axis=1))


def batches(sizes=(8, 6, 4, 6)):
    rng = np.random.RandomState(5)
    words = [rng.randint(0, ROWS - 4, (n, 2)).astype("float32") for n in sizes]
    return [(X, rng.randint(0, 2, len(X)).astype("float32")) for X in words]


def bag(ctx, hybridize=False):
    net, rng = Bag(), np.random.RandomState(6)
    net.initialize(ctx=ctx)
    runs.fill(net, [rng.normal(size=s).astype("float32") for s in ((ROWS, WIDTH), (2, WIDTH), 2)])
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    return net


OPTIMIZERS = {
    "sgd": {"learning_rate": 0.5, "lazy_update": True},
    "momentum": {"learning_rate": 0.5, "wd": 0.1, "momentum": 0.9, "lazy_update": True},
    "not lazy": {"learning_rate": 0.5, "wd": 0.1, "momentum": 0.9, "lazy_update": False},
    "adam": {"learning_rate": 0.1, "wd": 0.1, "lazy_update": True},
    "adagrad": {"learning_rate": 0.1},
    "ftrl": {"learning_rate": 0.1},
    "rmsprop": {"learning_rate": 0.1, "wd": 0.1},
}


def optimizer(name):
    kind = name if name in ("adam", "adagrad", "ftrl", "rmsprop") else "sgd"
    return mx.optimizer.create(kind, **OPTIMIZERS[name])


stock = functools.partial(gluon.Trainer, update_on_kvstore=False)


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_devices_train_with_the_bits_of_gluon_trainer(name, hybridize):
    """On two devices, where every sum is of two. If lazy, rows that no batch has stay as they are.

    With ``wd`` but no momentum MXNet's operator for many parameters rounds differently from that
    for one, which ``gluon.Trainer`` uses for all neighbours of a sparse parameter.
    """
    ctx, results = contexts(2), {}
    for make in (stock, Trainer):
        net = bag(ctx, hybridize)
        start = net.embed.weight.data(ctx[0]).asnumpy()
        runs.train(net, make(net.collect_params(), optimizer(name)), batches(), ctx)
        copies = [runs.values(net, device) for device in (0, 1)]
        for one, other in zip(*copies):
            assert one.tobytes() == other.tobytes()
        results[make] = [value.tobytes() for value in copies[0]]
        unused = copies[0][0][-4:].tobytes() == start[-4:].tobytes()
        assert unused == (name not in ("not lazy", "rmsprop", "ftrl"))
    assert len({tuple(bits) for bits in results.values()}) == 1


@pytest.mark.parametrize(
    "more, row", [({"compression": "fp16"}, 2048), ({"algorithm": "ring"}, 2049)]
)
def test_rows_are_compressed_as_dense_gradients_and_summed_by_no_plan(more, row):
    """2049 is no float16, and every device updates by all rows."""
    ctx = contexts(2)
    table = nn.Embedding(3, 1, sparse_grad=True)
    table.initialize(mx.init.Zero(), ctx=ctx)
    trainer = Trainer(table.collect_params(), "sgd", {"learning_rate": 1.0}, **more)
    with autograd.record():
        losses = [(table(mx.nd.array([i], ctx=c)) * 2049).sum() for i, c in enumerate(ctx)]
    autograd.backward(losses)
    trainer.step(1)
    for value in table.weight.list_data():
        assert value.asnumpy().tolist() == [[-row], [-row], [0]]


class Slowing(mx.optimizer.Optimizer):
    """Divides the learning rate by the number of its updates, of any parameters."""

    number = 0

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        self._update_count(index)
        self.number += 1
        rate = self._get_lr(index) / self.number
        weight[:] -= rate * self.rescale_grad * grad.tostype("default")


@pytest.mark.parametrize(
    "optimizer",
    [SGD, Adam, Nadam, functools.partial(LARS, momentum=0.9), Slowing],
    ids=["sgd", "adam", "nadam", "lars", "own"],
)
def test_all_devices_have_the_rates_of_one(optimizer):
    """Also a parameter that was left out of some steps, whose rate may be of the step before."""
    results = {}
    for make, k in ((stock, 1), (Trainer, 3)):
        ctx = contexts(k)
        net = bag(ctx)
        schedule = mx.lr_scheduler.FactorScheduler(1, 0.5)
        made = optimizer(lr_scheduler=schedule, learning_rate=0.1)
        trainer = make(net.collect_params(), made)
        for i, batch in enumerate(batches()):
            net.embed.weight.grad_req = "null" if i % 2 else "write"
            runs.train(net, trainer, [batch], ctx)
        results[k] = net
    runs.assert_as_one(results[3], runs.values(results[1]))


def test_an_optimizer_that_draws_numbers_updates_each_parameter_once():
    ctx = contexts(3)
    net = bag(ctx)
    runs.train(net, Trainer(net.collect_params(), mx.optimizer.SGLD()), batches(), ctx)
    runs.assert_as_one(net, runs.values(net))


@pytest.mark.parametrize("apart", ["saved", "moved", "split"])
def test_the_states_follow(apart, tmp_path):
    """What follows is as in one run: after loading states, on other contexts, in two calls."""
    ctx = contexts(2)
    net = bag(ctx)
    trainer = Trainer(net.collect_params(), optimizer("adam"))
    runs.train(net, trainer, batches()[:2], ctx)
    if apart == "saved":
        trainer.save_states(tmp_path / "states")
        trainer = Trainer(net.collect_params(), optimizer("adam"))
        runs.train(net, trainer, batches()[2:3], ctx)  # what is loaded replaces this
        trainer.load_states(tmp_path / "states")
        for param, value in zip(net.collect_params().values(), _after(2)):
            param.set_data(mx.nd.array(value))
    if apart == "moved":
        ctx = ctx[::-1]
        net.collect_params().reset_ctx(ctx)
    for batch in batches()[2:]:
        runs.backward(net, batch, ctx)
        if apart == "split":
            trainer.allreduce_grads()
            net.embed.weight.list_grad()[1][:] = 1e6  # the first device's count
            trainer.update(len(batch[0]))
        else:
            trainer.step(len(batch[0]))
    runs.assert_as_one(net, _after(4), rtol=0)


def _after(num_batches):
    ctx = contexts(2)
    net = bag(ctx)
    runs.train(net, stock(net.collect_params(), optimizer("adam")), batches()[:num_batches], ctx)
    return runs.values(net)


def test_an_infinite_row_skips_the_step_everywhere():
    ctx = contexts(2)
    net = bag(ctx)
    net.dense.collect_params().setattr("grad_req", "null")
    trainer = Trainer(net.collect_params(), optimizer("momentum"), skip_nonfinite=True)
    (X, y), before = batches()[0], runs.values(net)
    with autograd.record():
        losses = [net(a) * s for (a, _), s in zip(gluonpar.split_and_load((X, y), ctx), (1, 1e39))]
    autograd.backward(losses)
    trainer.step(len(X))
    assert trainer.num_skipped == 1
    runs.assert_as_one(net, before, rtol=0)


def test_accumulation_is_refused():
    trainer = Trainer(bag(contexts(2)).collect_params(), "sgd")
    with pytest.raises(ValueError, match="sparse_grad=False"), trainer.no_sync():
        pass
