"""SyncBatchNorm: K devices give what BatchNorm gives on one, for the whole batch."""

import contextlib
import functools
import gc
import itertools
import os
import pathlib
import threading
import time
import weakref

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib import estimator

from gluonpar import split_and_load, split_samples
from gluonpar.adapters.estimator import BatchProcessor
from gluonpar.adapters.towers import Towers
from gluonpar.batch_norm import device_sums
from gluonpar.batch_norm.sync_batch_norm import SyncBatchNorm, set_num_devices
from gluonpar.gluon.trainer import Trainer
from gluonpar.runtime import engine
from gluonpar.tasks import Round, TaskError, run_tasks
from tests.support.contexts import contexts, device
from tests.support.gluon_runs import STATIC
from tests.support.processes import end_python, run_python
from tests.support.sync_batch_norm_stress import Branches

HYBRIDIZED = {"imperative": {"active": False}, "hybridized": {}, "static": STATIC}
each_way = pytest.mark.parametrize("hybridized", HYBRIDIZED.values(), ids=HYBRIDIZED)
STRESS = pathlib.Path(__file__).parents[1] / "support" / "sync_batch_norm_stress.py"
on_cpu = pytest.mark.skipif(device(0).device_type == "gpu", reason="GPUs have a pool each")
on_gpu = pytest.mark.skipif(device(0).device_type == "cpu", reason="refused on CPU contexts")


def network(norm, **options):
    """Two normalised convolutions and a dense layer, with shapes deferred."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, padding=1), norm(prefix="norm0_", **options))
        net.add(nn.Activation("relu"), nn.Conv2D(4, 3), norm(prefix="norm1_", **options))
        net.add(nn.Dense(3))
    return net


def batch(n, step=0, dtype="float32"):
    rng = np.random.RandomState(step)
    X, w = rng.normal(1, 2, (n, 3, 6, 6)), rng.normal(size=(n, 3))
    return X.astype(dtype), w.astype(dtype)


def joined(arrays):
    return np.concatenate([array.asnumpy() for array in arrays])


def train(net, shards, ctx):
    """Outputs of forward and backward for shards (X, w), where the loss is w * output."""

    def forward_backward(shard):
        X, w = shard
        with autograd.record():
            out = net(X)
            loss = (out * w).sum()
        loss.backward()
        return out

    return run_tasks(forward_backward, shards, ctx)


def outputs(net, shards, ctx):
    """Outputs in training, without backward."""

    def forward(X):
        with autograd.record():
            return net(X)

    return run_tasks(forward, shards, ctx)


def run(net, ctx, n, fewer=(), weights=None, dtype="float32"):
    """Outputs in training and prediction, gradients and running statistics, after some steps.

    Steps on ``n`` samples and, between them, some on fewer.
    """
    trained = []
    for step, size in enumerate((n, n, *fewer, n)):
        shards = split_and_load(batch(size, step, dtype), ctx, weights=weights)
        trained.append(joined(train(net, shards, ctx)))
    params = net.collect_params().values()
    grads = [sum(g.asnumpy() for g in p.list_grad()) for p in params if p.grad_req != "null"]
    running = [[a.asnumpy() for a in p.list_data()] for p in params if p.grad_req == "null"]
    predicted = [net(X) for X, _ in split_and_load(batch(n, 9, dtype), ctx)]
    return trained, grads, running, joined(predicted)


def start(tmp_path, norm=nn.BatchNorm, n=2, dtype="float32", **options):
    """One device's network, and a file of its parameters."""
    mx.random.seed(1)
    one = network(norm, **options)
    one.initialize(mx.init.Xavier(), ctx=device(0))
    one.cast(dtype)
    one(mx.nd.array(batch(n, dtype=dtype)[0], device(0), dtype=dtype))
    path = str(tmp_path / "start.params")
    one.save_parameters(path)
    return one, path


def close(got, want, rtol=1e-5):
    assert np.linalg.norm(got - want) <= rtol * np.linalg.norm(want) + 1e-5


@each_way
@pytest.mark.parametrize(
    ("k", "n", "numpy", "options"),
    [
        *((k, n, False, {}) for k, n in ((1, 5), (2, 12), (3, 11), (4, 5), (8, 9))),
        (2, 6, True, {}),
        *((2, 6, False, {name: False}) for name in ("scale", "center")),
        (3, 7, False, {"epsilon": 0.5, "momentum": 0.2}),
    ],
)
def test_k_devices_give_what_batch_norm_gives_on_the_whole_batch(
    tmp_path, k, n, numpy, options, hybridized
):
    """Also if some batches have fewer samples than there are devices."""
    fewer = [size for size in (k - 1, 1) if size]
    one, path = start(tmp_path, **options)
    want_trained, want_grads, want_running, want_predicted = run(one, device(0), n, fewer)
    with mx.util.np_shape(numpy), mx.util.np_array(numpy):
        many = network(SyncBatchNorm, **options)
        many.load_parameters(path, ctx=contexts(k))
        many.hybridize(**hybridized)
        trained, grads, running, predicted = run(many, contexts(k), n, fewer)
    for got, want in zip(trained, want_trained):
        close(got, want)
    # A bias before a normalisation has gradient zero but for the rounding of large terms.
    largest = max(map(np.linalg.norm, want_grads))
    for got, want in zip(grads, want_grads):
        assert np.linalg.norm(got - want) <= 2e-5 * np.linalg.norm(want) + 1e-6 * largest
    for copies, (want,) in zip(running, want_running):
        for copy in copies:
            close(copy, want)
            np.testing.assert_array_equal(copy, copies[0])
    close(predicted, want_predicted)


def test_global_statistics_are_used_and_left_alone():
    layer = SyncBatchNorm(in_channels=2, use_global_stats=True, epsilon=0)
    layer.initialize(ctx=contexts(2))
    layer.running_mean.set_data(mx.nd.array([1, 2]))
    layer.running_var.set_data(mx.nd.array([4, 16]))
    with autograd.record():
        out = layer(mx.nd.array([[3, 6]], ctx=device(1)))  # without waiting
    np.testing.assert_array_equal(out.asnumpy(), [[1, 1]])
    np.testing.assert_array_equal(layer.running_mean.data(device(1)).asnumpy(), [1, 2])


def test_float64_agrees_to_its_own_precision_with_any_split(tmp_path):
    one, path = start(tmp_path, dtype="float64")
    many = network(SyncBatchNorm)
    many.cast("float64")
    many.load_parameters(path, ctx=contexts(2))
    got = run(many, contexts(2), 10, weights=[1, 9], dtype="float64")
    want = run(one, device(0), 10, dtype="float64")
    for ours, theirs in zip(got[0] + got[1], want[0] + want[1]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "values",
    [
        10000 + np.arange(8, dtype="float32"),  # a mean far from zero
        1000 * np.arange(8, dtype="float16"),  # whose squares are beyond float16
    ],
    ids=["float32", "float16"],
)
def test_large_values_cost_no_precision(values):
    layer = SyncBatchNorm(in_channels=1, epsilon=0)
    layer.cast(values.dtype)
    layer.initialize(ctx=contexts(2))
    shards = split_and_load(values.reshape(8, 1), contexts(2))
    normalised = joined(outputs(layer, shards, contexts(2)))[:, 0]
    assert normalised.dtype == values.dtype
    np.testing.assert_allclose(normalised, (np.arange(8) - 3.5) / np.arange(8).std(), rtol=1e-3)


def at_once(layer, X, Y):
    with autograd.record():
        loss = (layer(X) ** 3).sum() + 2 * (layer(Y) ** 3).sum()
    loss.backward()


def one_after_another(layer, X, Y):
    for factor, array in enumerate((X, Y), start=1):
        with autograd.record():
            loss = factor * (layer(array) ** 3).sum()
        loss.backward()


def two_batches(ctx):
    """Each device's shards of two batches, with gradients attached."""
    a, b = np.random.RandomState(0).normal(size=(2, 6, 1)) * [[[1]], [[100]]]
    shards = split_and_load((a.astype("float32"), b.astype("float32")), ctx)
    for array in sum(shards, ()):
        array.attach_grad()
    return shards


def gradients(shards):
    return [joined([shard[i].grad for shard in shards]) for i in range(2)]


@pytest.mark.parametrize("differentiate", [at_once, one_after_another])
@each_way
def test_a_layer_called_twice_in_one_task_keeps_its_calls_apart(hybridized, differentiate):
    results = []
    one, many = nn.BatchNorm(in_channels=1), SyncBatchNorm(in_channels=1)
    one.initialize(ctx=contexts(1))
    many.initialize(ctx=contexts(3))
    many.hybridize(**hybridized)
    for layer, ctx in [(one, contexts(1))] + [(many, contexts(3))] * 20:
        shards = two_batches(ctx)
        run_tasks(lambda shard, layer=layer: differentiate(layer, *shard), shards, ctx)
        results.append(gradients(shards))
    for got in results[1:]:
        for ours, theirs in zip(got, results[0]):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.cpu("on a GPU the backward of one call is computed after that of the other has ended")
def test_backward_of_two_calls_may_come_in_another_order_on_each_device():
    results = []
    for layer, ctx in (
        (nn.BatchNorm(), contexts(1)),
        (SyncBatchNorm(timeout_seconds=30), contexts(2)),
    ):
        layer.initialize(ctx=ctx)
        shards = two_batches(ctx)

        def forward(shard, layer=layer):
            with autograd.record():
                return [(layer(array) ** 3).sum() for array in shard]

        losses = run_tasks(forward, shards, ctx)
        for turn in range(2):
            firsts = [losses[i][(turn + i) % 2] for i in range(len(ctx))]
            run_tasks(lambda loss: loss.backward(retain_graph=True), firsts, ctx)
        results.append(gradients(shards))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_it_is_called_as_the_one_of_contrib():
    stock = gluon.contrib.nn.SyncBatchNorm(3, 2, 0.8, 1e-3, False, False, True, "ones")
    ours = SyncBatchNorm(3, 2, 0.8, 1e-3, False, False, True, "ones")
    for name in ("eps", "momentum", "fix_gamma", "use_global_stats"):
        assert ours._kwargs[name] == stock._kwargs[name]
    ours.initialize(ctx=contexts(2))
    np.testing.assert_array_equal(ours.beta.data(device(0)).asnumpy(), np.ones(3))
    assert ours.gamma.shape == (3,) and ours.num_devices == 2
    assert SyncBatchNorm(in_channels=4, num_devices=3, use_global_stats=True).num_devices == 3


def trained_outputs(net, ctx):
    """Outputs in training, and then the running statistics of the first device."""
    shards = [split_and_load(batch(n)[0], ctx) for n in (8, 1, 8)]
    [net(x) for x in shards[0]]
    outs = [joined(outputs(net, each, ctx)) for each in shards]
    running = [p for p in net.collect_params().values() if p.grad_req == "null"]
    return [*outs, *sorted((p.data(ctx[0]).asnumpy() for p in running), key=np.linalg.norm)]


@pytest.mark.filterwarnings("ignore:Cannot decide type")
@each_way
def test_an_exported_network_trains_when_its_block_is_gone(tmp_path, hybridized):
    ctx, net, path = contexts(2), network(SyncBatchNorm, momentum=0.7), str(tmp_path / "net")
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize()
    trained_outputs(net, ctx)
    net.export(path)
    want = trained_outputs(net, ctx)
    del net
    gc.collect()
    net = gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params", ctx)
    net.hybridize(**hybridized)
    for ours, theirs in zip(trained_outputs(net, ctx), want):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_symbol_is_made_of_a_layer_that_is_not_initialised():
    """gluon-cv's FeatureExpander makes its networks so."""
    layer = SyncBatchNorm(in_channels=3, num_devices=2)
    assert layer(mx.sym.var("data")).list_arguments()[0] == "data"


def layer_on(k, **options):
    layer = SyncBatchNorm(in_channels=1, **options)
    layer.initialize(ctx=contexts(k))
    return layer


def values(layer, k=3):
    """The outputs in training for 0, 1, ..., one per device."""
    shards = [mx.nd.full((1, 1), i, ctx=c) for i, c in enumerate(contexts(k))]
    return [out.asnumpy().item() for out in outputs(layer, shards, contexts(k))]


NORMALISED = [-(1.5**0.5), 0, 1.5**0.5]  # 0, 1, 2


def test_in_run_tasks_the_devices_are_those_of_the_tasks_whatever_was_declared():
    layer = layer_on(3, num_devices=2)
    np.testing.assert_allclose(values(layer), NORMALISED, rtol=1e-4, atol=1e-6)


def test_run_tasks_within_a_task_is_part_of_that_tasks_call():
    layer = layer_on(3)
    shards = [mx.nd.full((1, 1), i, ctx=c) for i, c in enumerate(contexts(3))]
    outs = run_tasks(lambda X: outputs(layer, [X], [X.context])[0], shards, contexts(3))
    got = [out.asnumpy().item() for out in outs]
    np.testing.assert_allclose(got, NORMALISED, rtol=1e-4, atol=1e-6)


@on_gpu
def test_in_a_plain_loop_more_devices_than_were_set_are_an_error():
    layer = layer_on(3, num_devices=2)

    def outputs_of(k):
        with autograd.record():
            outs = [layer(mx.nd.full((1, 1), i, ctx=c)) for i, c in enumerate(contexts(k))]
        return [out.asnumpy().item() for out in outs]

    with pytest.raises(mx.MXNetError, match="num_devices is 2"):
        outputs_of(3)
    with contextlib.suppress(mx.MXNetError):
        mx.nd.waitall()
    set_num_devices(layer, 2)
    np.testing.assert_allclose(outputs_of(2), [-1, 1], rtol=1e-4)
    set_num_devices(layer, None)
    np.testing.assert_allclose(outputs_of(3), NORMALISED, rtol=1e-4, atol=1e-6)


def sgd():
    return mx.optimizer.SGD(learning_rate=0.1)


def by_towers(net, ctx):
    loss = gluon.loss.L2Loss()
    towers = Towers(lambda xy, net: loss(net(xy[0]), xy[1]), net, ctx, sgd())
    for step, size in enumerate((6, 2, 1, 6)):
        towers.step(split_samples(batch(size, step), ctx))


def by_estimator(net, ctx):
    """Seven samples in batches of three: the last is of one."""
    X, w = batch(7)
    batches = gluon.data.DataLoader(gluon.data.ArrayDataset(X, w, X), 3)  # stock, too, takes two
    used = set()

    class Noting(gluon.loss.L2Loss):
        def __call__(self, prediction, label):
            used.add(prediction.context)
            return super().__call__(prediction, label)

    how = {"context": ctx, "batch_processor": BatchProcessor()}
    trainer = Trainer(net.collect_params(), sgd())
    metrics = mx.metric.Loss()
    program = estimator.Estimator(net, Noting(), metrics, trainer=trainer, **how)
    program.logger.setLevel("ERROR")
    program.fit(batches, epochs=2)
    assert used == {*ctx}


@pytest.mark.parametrize("by", [by_towers, by_estimator])
def test_towers_and_estimators_train_as_one_device_also_on_fewer_samples_than_devices(tmp_path, by):
    _, path = start(tmp_path)
    results = []
    for norm, ctx in ((nn.BatchNorm, contexts(1)), (SyncBatchNorm, contexts(3))):
        net = network(norm)
        net.load_parameters(path, ctx=ctx)
        net.hybridize()
        by(net, ctx)
        params = net.collect_params().values()
        results.append([[copy.asnumpy() for copy in param.list_data()] for param in params])
    for (want,), copies in zip(*results):
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])
            close(copy, want, 1e-4)


def test_a_device_that_alone_calls_a_layer_is_an_error_and_later_calls_are_right():
    layer = layer_on(3, timeout_seconds=600, prefix="lonely_")

    def task(X):
        if X.context == device(1):
            with autograd.record():
                return layer(X)

    with pytest.raises(RuntimeError, match=r"lonely_? must .* all 3 devices.* 1 on [cg]pu\(1\)$"):
        run_tasks(task, [mx.nd.ones((2, 1), ctx=c) for c in contexts(3)], contexts(3))
    np.testing.assert_allclose(values(layer), NORMALISED, rtol=1e-4, atol=1e-6)


def test_a_device_that_alone_calls_backward_gets_an_error_in_time():
    layer = layer_on(3, timeout_seconds=60, prefix="lonely_")
    shards = split_and_load(np.arange(6, dtype="float32").reshape(6, 1), contexts(3))
    for shard in shards:
        shard.attach_grad()
    outs = [out**2 for out in outputs(layer, shards, contexts(3))]
    mx.nd.waitall()
    layer.timeout_seconds = 1

    def task(shard):
        with autograd.record():
            out = layer(shard) ** 2
        if shard.context == device(2):
            out.backward()

    run_tasks(task, shards, contexts(3))
    with pytest.raises(
        mx.MXNetError, match=r"lonely_?: .* after 1 s. Of 3 devices only [cg]pu\(2\) arrived"
    ):
        shards[2].grad.asnumpy()
    assert outs


@each_way
def test_a_task_that_fails_costs_its_step_and_no_other(hybridized, tmp_path, monkeypatch):
    """Neither one that is still running then, nor the next."""
    one, path = start(tmp_path)
    many = network(functools.partial(SyncBatchNorm, timeout_seconds=600))
    many.load_parameters(path, ctx=contexts(3))
    many.hybridize(**hybridized)
    go_on, wait = threading.Event(), mx.nd.waitall
    monkeypatch.setattr(mx.nd, "waitall", lambda: (go_on.set(), wait()))
    got, want = [], []
    for net, ctx, outs in ((one, contexts(1), want), (many, contexts(3), got)):
        trainer = Trainer(net.collect_params(), sgd())
        shards = [split_and_load(batch(7, step), ctx) for step in range(3)]
        go_on.clear()
        if net is many:
            engine.push(go_on.wait, mx.cpu(), writes=[shards[0][1][0]], prioritized=True)
        outs.append(train(net, shards[0], ctx))
        trainer.step(7)
        if net is many:
            with pytest.raises(TaskError, match=r"on [cg]pu\(2\): TypeError"):
                train(net, [*shards[1][:2], None], ctx)
            assert go_on.is_set()
        outs.append(train(net, shards[2], ctx))
        trainer.step(7)
        outs.extend(p.list_data() for p in net.collect_params().values())
    for ours, theirs in zip(got[:2], want[:2]):
        close(joined(ours), theirs[0].asnumpy())
    for copies, (param,) in zip(got[2:], want[2:]):
        for copy in copies:
            close(copy.asnumpy(), param.asnumpy(), 1e-4)


def test_a_backward_that_fails_is_not_waited_for_though_its_forward_was_in_another_call():
    layer = layer_on(3, timeout_seconds=90)
    shards = split_and_load(np.arange(3, dtype="float32").reshape(3, 1), contexts(3))
    for shard in shards:
        shard.attach_grad()
    outs, start = outputs(layer, shards, contexts(3)), time.monotonic()
    with pytest.raises(TaskError, match=r"on [cg]pu\(2\): AttributeError"):
        run_tasks(lambda out: out.backward(), [*outs[:2], None], contexts(3))
    assert time.monotonic() - start < 60
    np.testing.assert_allclose(values(layer), NORMALISED, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SyncBatchNorm(timeout_seconds=0), "timeout_seconds must be positive, got 0"),
        (lambda: set_num_devices(SyncBatchNorm(), 0), "num_devices must be at least 1.*got 0"),
    ],
)
def test_bad_requests_are_refused_with_their_values(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def deep(num_blocks=4):
    """Convolutions and SyncBatchNorms in branches, and random numbers."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(2, 3, padding=1), *(Branches(2, 2, 1) for _ in range(num_blocks)))
    net.add(nn.Dropout(0.2), nn.Dense(3))
    return net


@each_way
def test_no_device_is_queued_behind_another_that_waits_for_it(hybridized):
    """With so many operators every entry of a common pool of workspaces would be drawn twice."""
    net, ctx = deep(), contexts(4)
    net.initialize(ctx=ctx)
    net.hybridize(**hybridized)
    X, w = np.ones((8, 2, 6, 6), "float32"), np.ones((8, 3), "float32")
    for _ in range(4):
        shards = split_and_load((X, w), ctx)
        assert all(net(x).shape == (2, 3) for x, _ in shards)  # in prediction, in a plain loop
        outs = train(net, shards, ctx)
    assert all(np.isfinite(out.asnumpy()).all() for out in outs)
    mx.nd.waitall()


@pytest.mark.slow
@on_cpu
@pytest.mark.parametrize("pool", [1, 4, 64])
def test_random_networks_train_whatever_the_pool(pool):
    seconds = float(os.environ.get("GLUONPAR_STRESS_SECONDS", "24")) / 3
    setting = {"MXNET_CPU_TEMP_COPY": str(pool)}
    printed = run_python(STRESS.read_text(), seconds, pool, seconds=seconds + 600, **setting)
    print(f"pool {pool}: {printed}")


@on_cpu
def test_naive_engine_is_refused():
    program = """
import gluonpar, mxnet as mx
layer, ctx = gluonpar.SyncBatchNorm(in_channels=1), [mx.cpu(0), mx.cpu(1)]
layer.initialize(ctx=ctx)
X = [mx.nd.ones((2, 1), ctx=c) for c in ctx]
print([layer(x).shape for x in X])
def task(x):
    with mx.autograd.record():
        return layer(x)
gluonpar.run_tasks(task, X, ctx)
"""
    done = end_python(program, MXNET_ENGINE_TYPE="NaiveEngine")
    assert done.stdout == "[(2, 1), (2, 1)]\n"
    assert done.returncode == 1 and "unset MXNET_ENGINE_TYPE" in done.stderr


class TestPlainLoops:
    """On CPU contexts they are refused at once; on GPUs each device has its own workspaces."""

    @pytest.fixture(params=HYBRIDIZED.values(), ids=HYBRIDIZED)
    def net(self, request):
        net = deep(2)
        net.initialize(ctx=contexts(3))
        net.hybridize(**request.param)
        yield net
        with contextlib.suppress(mx.MXNetError):
            mx.nd.waitall()  # what was computed from what was refused

    shards = property(lambda self: split_and_load(np.ones((6, 2, 6, 6), "float32"), contexts(3)))

    def step(self, net):
        with autograd.record():
            outs = [net(x) for x in self.shards]
        autograd.backward(outs)
        return [out.asnumpy() for out in outs]

    @on_cpu
    @pytest.mark.parametrize("has_predicted", [False, True])
    def test_are_refused_at_once_or_where_a_result_is_read(self, net, has_predicted):
        if has_predicted:
            [net(x).asnumpy() for x in self.shards]
        # MXNetError is a RuntimeError
        with pytest.raises((RuntimeError, ValueError), match="run_tasks"):
            self.step(net)

    @on_cpu
    def test_are_refused_for_backward_alone(self, net):
        outs = outputs(net, self.shards, contexts(3))
        autograd.backward(outs)
        with pytest.raises(mx.MXNetError, match="run_tasks"):
            [p.grad(c).asnumpy() for p in trained(net) for c in contexts(3)]

    @on_gpu
    def test_train_as_run_tasks_does(self, net):
        for _ in range(5):
            outs = self.step(net)
        assert all(np.isfinite(out).all() for out in outs)

    def test_predict(self, net):
        outs = [net(x) for x in self.shards]
        for out in outs[1:]:
            np.testing.assert_array_equal(out.asnumpy(), outs[0].asnumpy())

    def test_are_right_with_one_device(self, net):
        set_num_devices(net, 1)
        with autograd.record():
            out = net(self.shards[0])
        out.backward()
        assert np.isfinite(out.asnumpy()).all()


def trained(net):
    return [p for p in net.collect_params().values() if p.grad_req != "null"]


def test_values_are_added_in_the_order_of_the_devices_not_of_arrival():
    given = 1.0, 1e16, -1e16  # in this order their sum is 0, in another 1
    ended = []
    for order in itertools.permutations(range(3)):
        current, layer = device_sums.RoundSums(Round(3)), SyncBatchNorm()
        for i in order:
            assert not ended
            key, value = current.begin(layer, device(i), False), np.array([given[i]])
            device_sums.add(key, device(i), value, lambda *ending: ended.append(ending))
        assert ended == [(0, "")] * 3
        ended.clear()


def test_the_operator_adds_where_a_gradient_accumulates():
    """No network asks for it, as a sum comes before the operator; a symbol of one's own may."""
    sums, shape, running = mx.nd.array([6, 9]), mx.nd.array([3, 2, 1]), mx.nd.zeros((2,))
    sums.attach_grad("add")
    how = {"key": "of a symbol", "name_of_layer": "its_layer", "num_devices": 1, "momentum": 0.9}
    for number in (1, 2):
        with autograd.record():
            mean = mx.nd.Custom(
                *(sums, shape, running), op_type="gluonpar_mean_over_devices",
                **how, frozen=0, variance=0,
            )  # fmt: skip
        mean.backward(mx.nd.array([3, 12]))
        assert mean.asnumpy().tolist() == [2, 3]
        assert sums.grad.asnumpy().tolist() == [number, 4 * number]


def test_a_network_that_is_dropped_is_freed_with_its_graph_and_what_that_keeps():
    """With static memory the graph keeps the operators, and they the layer."""
    ctx, X, kept = contexts(2), [mx.nd.ones((2, 3), ctx=c) for c in contexts(2)], []
    for _ in range(3):
        net = nn.HybridSequential()
        net.add(nn.Dense(4, in_units=3), SyncBatchNorm(in_channels=4))
        net.initialize(ctx=ctx)
        net.hybridize(**STATIC)

        def forward_backward(shard, net=net):
            with autograd.record():
                loss = net(shard)
            loss.backward()

        run_tasks(forward_backward, X, ctx)
        mx.nd.waitall()
        kept.append(weakref.ref(net))
        del net, forward_backward
    gc.collect()
    assert [net() for net in kept] == [None] * 3
