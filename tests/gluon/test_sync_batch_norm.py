"""SyncBatchNorm: K devices give what BatchNorm gives on one, for the whole batch."""

import threading

import mxnet as mx
import numpy as np
import pytest
from contexts import contexts, device
from mxnet import autograd, gluon, npx
from mxnet.gluon import nn

from gluonpar import split_and_load
from gluonpar.collectives import partition
from gluonpar.gluon import rendezvous
from gluonpar.gluon.sync_batch_norm import SyncBatchNorm, set_num_devices
from gluonpar.gluon.trainer import Trainer

HYBRIDIZED = {
    "imperative": None,
    "hybridized": {},
    "static": {"static_alloc": True, "static_shape": True},
}
NUM_STEPS = 3


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


def run(net, ctx, n, weights=None, dtype="float32"):
    """Outputs in training and prediction, gradients and running statistics, after some steps."""
    trained = []
    for step in range(NUM_STEPS):
        shards = split_and_load(batch(n, step, dtype), ctx, weights=weights)
        with autograd.record():
            outs = [net(X) for X, _ in shards]
            losses = [(out * w).sum() for out, (_, w) in zip(outs, shards)]
        autograd.backward(losses)
        trained.append(np.concatenate([out.asnumpy() for out in outs]))
    params = net.collect_params().values()
    grads = [sum(g.asnumpy() for g in p.list_grad()) for p in params if p.grad_req != "null"]
    running = [[a.asnumpy() for a in p.list_data()] for p in params if p.grad_req == "null"]
    predicted = [net(X).asnumpy() for X, _ in split_and_load(batch(n, 9, dtype), ctx)]
    return trained, grads, running, np.concatenate(predicted)


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


@pytest.mark.parametrize("hybridized", HYBRIDIZED)
@pytest.mark.parametrize(("k", "n"), [(1, 5), (2, 12), (3, 12), (4, 12), (3, 11), (4, 5), (8, 9)])
def test_k_devices_give_what_batch_norm_gives_on_the_whole_batch(tmp_path, k, n, hybridized):
    one, path = start(tmp_path)
    many = network(SyncBatchNorm)
    many.load_parameters(path, ctx=contexts(k))
    if HYBRIDIZED[hybridized] is not None:
        many.hybridize(**HYBRIDIZED[hybridized])
    trained, grads, running, predicted = run(many, contexts(k), n)
    want_trained, want_grads, want_running, want_predicted = run(one, device(0), n)
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


def test_float64_agrees_to_its_own_precision(tmp_path):
    one, path = start(tmp_path, dtype="float64")
    many = network(SyncBatchNorm)
    many.cast("float64")
    many.load_parameters(path, ctx=contexts(3))
    got, want = run(many, contexts(3), 7, dtype="float64"), run(one, device(0), 7, dtype="float64")
    for ours, theirs in zip(got[0] + got[1], want[0] + want[1]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def test_samples_weigh_the_same_however_they_are_split(tmp_path):
    one, path = start(tmp_path)
    many = network(SyncBatchNorm)
    many.load_parameters(path, ctx=contexts(2))
    trained = run(many, contexts(2), 10, weights=[1, 9])[0]
    for got, want in zip(trained, run(one, device(0), 10)[0]):
        close(got, want)


@pytest.mark.parametrize(
    "options",
    [{"scale": False}, {"center": False}, {"epsilon": 0.5}, {"momentum": 0.2}, {}],
    ids=str,
)
def test_options_are_those_of_batch_norm(tmp_path, options):
    one, path = start(tmp_path, **options)
    many = network(SyncBatchNorm, **options)
    many.load_parameters(path, ctx=contexts(2))
    for got, want in zip(run(many, contexts(2), 6), run(one, device(0), 6)):
        for ours, theirs in zip(got, want):
            close(np.asarray(ours[0]), np.asarray(theirs[0]), 2e-5)


def test_global_statistics_are_used_and_left_alone():
    layer = SyncBatchNorm(in_channels=2, use_global_stats=True, epsilon=0)
    layer.initialize(ctx=contexts(2))
    layer.running_mean.set_data(mx.nd.array([1, 2]))
    layer.running_var.set_data(mx.nd.array([4, 16]))
    with autograd.record():
        out = layer(mx.nd.array([[3, 6]], ctx=device(1)))  # without waiting
    np.testing.assert_array_equal(out.asnumpy(), [[1, 1]])
    np.testing.assert_array_equal(layer.running_mean.data(device(1)).asnumpy(), [1, 2])


def test_a_mean_far_from_zero_costs_no_precision():
    layer = SyncBatchNorm(in_channels=1, epsilon=0)
    layer.initialize(ctx=contexts(2))
    values = 10000 + np.arange(8, dtype="float32").reshape(8, 1)
    with autograd.record():
        out = [layer(shard) for shard in split_and_load(values, contexts(2))]
    want = (np.arange(8) - 3.5) / np.arange(8).std()
    got = np.concatenate([array.asnumpy() for array in out])[:, 0]
    np.testing.assert_allclose(got, want, rtol=1e-3)


def test_half_precision_is_normalised_in_float32():
    layer = SyncBatchNorm(in_channels=1, epsilon=0)
    layer.cast("float16")
    layer.initialize(ctx=contexts(2))
    values = 1000 * np.arange(8, dtype="float16").reshape(8, 1)  # squares are beyond float16
    with autograd.record():
        out = [layer(shard) for shard in split_and_load(values, contexts(2))]
    got = np.concatenate([array.asnumpy() for array in out])[:, 0]
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, (np.arange(8) - 3.5) / np.arange(8).std(), rtol=1e-3)


@pytest.mark.parametrize("hybridized", HYBRIDIZED)
def test_the_numpy_world_gives_the_same(tmp_path, hybridized):
    one, path = start(tmp_path)
    want = run(one, device(0), 6)[0]
    npx.set_np()
    try:
        many = network(SyncBatchNorm)
        many.load_parameters(path, ctx=contexts(2))
        if HYBRIDIZED[hybridized] is not None:
            many.hybridize(**HYBRIDIZED[hybridized])
        got = run(many, contexts(2), 6)[0]
    finally:
        npx.reset_np()
    for ours, theirs in zip(got, want):
        close(ours, theirs)


def test_a_layer_called_twice_in_one_step_keeps_its_calls_apart():
    """In either order on each device, forward and backward."""
    a, b = np.random.RandomState(0).normal(size=(2, 6, 1)).astype("float32") * [[[1]], [[100]]]
    results = []
    one, many = nn.BatchNorm(in_channels=1), SyncBatchNorm(in_channels=1)
    one.initialize(ctx=contexts(1))
    many.initialize(ctx=contexts(3))
    for layer, ctx in [(one, contexts(1))] + [(many, contexts(3))] * 20:
        shards = split_and_load((a.astype("float32"), b.astype("float32")), ctx)
        for array in sum(shards, ()):
            array.attach_grad()
        with autograd.record():
            losses = [(layer(X) ** 3).sum() + 2 * (layer(Y) ** 3).sum() for X, Y in shards]
        autograd.backward(losses)
        results.append([np.concatenate([s[i].grad.asnumpy() for s in shards]) for i in range(2)])
    for got in results[1:]:
        for ours, theirs in zip(got, results[0]):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_backward_of_different_calls_uses_different_rounds(monkeypatch):
    layer, tags = SyncBatchNorm(in_channels=1), []
    layer.initialize(ctx=contexts(2))
    meet = rendezvous.Rendezvous.sum

    def recorded(self, tag, device, values):
        tags.append((self.name, tag, device))
        return meet(self, tag, device, values)

    monkeypatch.setattr(rendezvous.Rendezvous, "sum", recorded)
    shards = split_and_load(np.arange(4, dtype="float32").reshape(4, 1), contexts(2))
    for shard in shards:
        shard.attach_grad()
    with autograd.record():
        losses = [layer(shard) ** 3 + layer(shard * 2) ** 2 for shard in shards]
    autograd.backward(losses)
    for shard in shards:
        shard.grad.asnumpy()
    rounds = [1, 2, ("backward", 1), ("backward", 2)]
    for name in {name for name, _, _ in tags}:
        for where in map(str, contexts(2)):
            met = [tag for own, tag, who in tags if (own, who) == (name, where)]
            assert sorted(met, key=str) == sorted(rounds, key=str)


def test_the_same_run_gives_the_same_bits_whichever_thread_is_first(tmp_path):
    path = start(tmp_path)[1]
    many = network(SyncBatchNorm)
    many.load_parameters(path, ctx=contexts(3))
    many.hybridize()
    once = run(many, contexts(3), 9)
    many.load_parameters(path, ctx=contexts(3))
    again = run(many, contexts(3), 9)
    for one, other in zip(once[0] + once[1], again[0] + again[1]):
        np.testing.assert_array_equal(one, other)


def test_it_trains_under_the_trainer_as_one_device_does(tmp_path):
    one, path = start(tmp_path)
    many = network(SyncBatchNorm)
    many.load_parameters(path, ctx=contexts(3))
    for net, trainer, ctx in (
        (one, gluon.Trainer(one.collect_params(), "sgd", {"learning_rate": 0.05}), contexts(1)),
        (many, Trainer(many.collect_params(), "sgd", {"learning_rate": 0.05}), contexts(3)),
    ):
        for step in range(NUM_STEPS):
            with autograd.record():
                losses = [(net(X) * w).sum() for X, w in split_and_load(batch(8, step), ctx)]
            autograd.backward(losses)
            trainer.step(8)
    for got, want in zip(many.collect_params().values(), one.collect_params().values()):
        close(got.data(device(2)).asnumpy(), want.data().asnumpy(), 2e-5)


class TestMissingDevices:
    @pytest.fixture
    def layer(self):
        layer = SyncBatchNorm(timeout_seconds=1, in_channels=1, prefix="lonely_")
        layer.initialize(ctx=contexts(3))
        return layer

    def wait_long(self, layer, seconds=60):
        for place in layer._rendezvous:
            place.timeout_seconds = seconds

    def test_are_an_error_that_names_those_that_arrived(self, layer):
        with autograd.record():
            out = layer(mx.nd.ones((2, 1), ctx=device(1)))
        with pytest.raises(
            mx.MXNetError,
            match=r"mean of lonely_?: of 3 devices only [cg]pu\(1\) arrived within 1 s",
        ):
            out.asnumpy()

    def test_in_backward_too(self, layer):
        self.wait_long(layer)
        shards = split_and_load(np.arange(6, dtype="float32").reshape(6, 1), contexts(3))
        for shard in shards:
            shard.attach_grad()
        with autograd.record():
            outs = [layer(shard) ** 2 for shard in shards]
        mx.nd.waitall()
        self.wait_long(layer, 1)
        outs[2].backward()
        with pytest.raises(
            mx.MXNetError, match=r"variance of lonely_?: of 3 devices only [cg]pu\(2\) arrived"
        ):
            shards[2].grad.asnumpy()

    def test_do_not_affect_later_rounds(self, layer):
        with autograd.record():
            out = layer(mx.nd.ones((2, 1), ctx=device(1)))
        with pytest.raises(mx.MXNetError):
            out.asnumpy()
        self.wait_long(layer)
        shards = split_and_load(np.array([[0], [1], [2]], "float32"), contexts(3))
        with autograd.record():
            outs = [layer(shard) for shard in shards]
        values = [out.asnumpy().item() for out in outs]
        np.testing.assert_allclose(values, [-(1.5**0.5), 0, 1.5**0.5], rtol=1e-4, atol=1e-6)

    def test_can_be_declared(self, layer):
        self.wait_long(layer)
        set_num_devices(layer, 2)
        with autograd.record():
            outs = [layer(mx.nd.full((1, 1), 2 * i, ctx=c)) for i, c in enumerate(contexts(2))]
        np.testing.assert_allclose([out.asnumpy().item() for out in outs], [-1, 1], rtol=1e-4)
        set_num_devices(layer, None)
        self.wait_long(layer, 1)
        with autograd.record():
            out = layer(mx.nd.ones((2, 1), ctx=device(0)))
        with pytest.raises(mx.MXNetError, match="of 3 devices"):
            out.asnumpy()

    def test_take_part_again_later(self, layer):
        self.wait_long(layer)
        for num_devices in (1, 2, None, 1, None):
            set_num_devices(layer, num_devices)
            k = num_devices or 3
            with autograd.record():
                outs = [layer(mx.nd.full((1, 1), i, ctx=c)) for i, c in enumerate(contexts(k))]
            autograd.backward(outs)
            mx.nd.waitall()
            assert sum(out.asnumpy().item() for out in outs) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SyncBatchNorm(timeout_seconds=0), "timeout_seconds must be positive, got 0"),
        (lambda: SyncBatchNorm(axis=3), "axis must be 1, got 3"),
        (lambda: set_num_devices(SyncBatchNorm(), 0), "num_devices must be at least 1.*got 0"),
    ],
)
def test_bad_requests_are_refused_with_their_values(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_deep_networks_do_not_deadlock_when_hybridized_static():
    net = nn.HybridSequential()
    for i in range(80):
        net.add(nn.Conv2D(2, 1, in_channels=2))
        if i % 20 == 10:
            net.add(SyncBatchNorm(timeout_seconds=30, in_channels=2))
    net.initialize(ctx=contexts(2))
    net.hybridize(static_alloc=True, static_shape=True)
    with autograd.record():
        outs = [net(mx.nd.ones((1, 2, 3, 3), ctx=c)) for c in contexts(2)]
    autograd.backward(outs)
    assert all(np.isfinite(out.asnumpy()).all() for out in outs)
    mx.nd.waitall()


def test_values_are_added_in_the_order_of_the_devices_not_of_arrival():
    given = {"a": 1.0, "b": 1e16, "c": -1e16}  # (a + b) + c is 0, and (b + c) + a is 1
    for order in ("abc", "cba", "bca"):
        place, sums = rendezvous.Rendezvous("test", lambda: 3), {}

        def arrive(device, place=place, sums=sums):
            sums[device] = place.sum(1, device, np.array([given[device]]))

        threads_ = [threading.Thread(target=arrive, args=(device,)) for device in order]
        for number, thread in enumerate(threads_[:2], 1):
            thread.start()
            while 1 not in place._rounds or len(place._rounds[1][0]) < number:
                thread.join(0.001)
        threads_[2].start()
        for thread in threads_:
            thread.join()
        assert [sums[device][0] for device in "abc"] == [0, 0, 0]


def test_rounds_after_a_restart_are_the_same_on_all_devices_and_none_of_those_before():
    place = rendezvous.Rendezvous("test", lambda: 2)
    before = {place.begin(device) for device in "aaab"}  # backward may still come
    place.restart()
    after = {place.begin(device) for device in "ab"}
    assert len(after) == 1 and after.isdisjoint(before)


def test_an_abandoned_rendezvous_releases_all_threads():
    place, errors = rendezvous.Rendezvous("test", lambda: 2), []
    started = threading.Event()

    def arrive():
        try:
            started.set()
            place.sum(1, "a", np.zeros(1))
        except rendezvous.RendezvousTimeout as error:
            errors.append(str(error))

    thread = threading.Thread(target=arrive)
    thread.start()
    started.wait()
    while thread.is_alive():  # it may not wait yet
        place.abandon()
        thread.join(0.01)
    assert errors and "only a arrived before the process ended" in errors[0]


def test_the_planted_bug_of_devices_weighing_the_same_is_caught(tmp_path, monkeypatch):
    """Counts of one per device are the mean of means."""
    one, path = start(tmp_path)
    many = network(SyncBatchNorm)
    many.load_parameters(path, ctx=contexts(2))

    class Alike(rendezvous.Rendezvous):
        def sum(self, tag, device, values):
            if tag is None or isinstance(tag, tuple):
                return super().sum(tag, device, values)
            return super().sum(tag, device, values / values[-1])

    for place in list(rendezvous.by_key.values()):
        place.__class__ = Alike
    trained = run(many, contexts(2), 10, weights=[1, 9])[0]
    want = run(one, device(0), 10)[0]
    assert max(np.abs(a - b).max() for a, b in zip(trained, want)) > 1e-2
    assert partition.sizes(10, 2, [1, 9]) == [1, 9]
