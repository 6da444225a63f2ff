"""train_batch: K devices train as one, and as the float64 oracle says."""

import functools
import math
import threading

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from gluonpar import optim, replicas
from gluonpar.models.lenet import LENET_SHAPES
from gluonpar.plans import partition
from gluonpar.runtime import engine, heap, threads
from tests.support import oracle
from tests.support.contexts import contexts, device

LR = 0.2
NUM_STEPS = 3


def start():
    """The same eight parameters, as NumPy, with half of every layer's relus well above their kink.

    The other half lies well below. Near a kink, float32 and float64 may fall on different sides,
    and one such unit is seen in the sum over 64 samples; so the biases keep every input of every
    relu off it.
    """
    rng = np.random.RandomState(0)
    params = [(0.02 * rng.normal(size=shape)).astype("float32") for shape in LENET_SHAPES]
    for bias, distance in zip(params[1:6:2], (0.5, 1, 2)):
        bias += distance * np.where(np.arange(len(bias)) % 2, 1, -1)
    return params


def make_batches(n, seed=0):
    """Three batches of images in [0, 1]: the pattern of their class, under noise."""
    rng = np.random.RandomState(seed)
    patterns = rng.rand(10, 1, 28, 28)
    batches = []
    for _ in range(NUM_STEPS):
        y = rng.randint(0, 10, size=n)
        X = (patterns[y] + rng.rand(n, 1, 28, 28)) / 2
        batches.append((X.astype("float32"), y))
    return batches


def replicas_of(params, ctx):
    return [gluonpar.get_params([mx.nd.array(p) for p in params], c) for c in ctx]


def train(batches, k, params=None):
    """Device parameters, as NumPy, after one step a batch on k devices."""
    ctx = contexts(k)
    device_params = replicas_of(params or start(), ctx)
    for X, y in batches:
        gluonpar.train_batch(X, y.astype("float32"), device_params, ctx, LR)
    return [[param.asnumpy() for param in params] for params in device_params]


def relative_error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.fixture(scope="module")
def expected():
    """Per batch size: the batches, and the oracle's parameters after them."""

    @functools.lru_cache(None)
    def solve(n):
        batches = make_batches(n)
        params, margins = oracle.train(batches, start(), LR)
        assert margins.min() > 0.01, "a relu's input is near its kink"
        return batches, params

    return solve


@pytest.mark.parametrize("n", [64, 63, 7, 1])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8])
def test_k_devices_train_as_the_oracle(expected, n, k):
    batches, want = expected(n)
    first, *rest = train(batches, k)
    for i, (got, w, before) in enumerate(zip(first, want, start())):
        assert relative_error(got, w) < 1e-5, f"parameter {i}"
        assert relative_error(got - before, w - before) < 1e-3, f"the change of parameter {i}"
    for params in rest:
        for got, same in zip(params, first):
            np.testing.assert_array_equal(got, same)


@pytest.mark.parametrize("weights", [None, [1, 2, 1], [0.01, 5, 1]])
def test_losses_are_per_sample_and_device_and_from_before_the_update(weights):
    X, y = make_batches(5)[0]
    ctx = contexts(3)
    device_params = replicas_of(start(), ctx)
    losses = gluonpar.train_batch(X, y, device_params, ctx, LR, weights=weights)
    assert [loss.context for loss in losses] == ctx
    assert [loss.shape for loss in losses] == [(n,) for n in partition.sizes(5, 3, weights)]
    want = oracle.Step(X.astype("float64"), y, [p.astype("float64") for p in start()]).losses
    got = np.concatenate([loss.asnumpy() for loss in losses])
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_a_parameter_without_axes_trains_on_fewer_samples_than_devices(algorithm):
    ctx = contexts(3)
    with mx.util.np_shape(True), mx.util.np_array(True):
        device_params = [gluonpar.get_params([mx.np.ones(())], c) for c in ctx]
        for n in (3, 1):
            batch = np.arange(1, n + 1, dtype="float32"), np.zeros(n, "float32")
            model, loss = lambda x, params: x * params[0], lambda p, t: p - t
            gluonpar.train_batch(*batch, device_params, ctx, 0.25, model, loss, algorithm)
    assert [params[0].item() for params in device_params] == [1 - 0.25 * 2 - 0.25 * 1] * 3


class Waiting(mx.autograd.Function):
    """The same values; ``wait(dy, ctx)`` is called where the gradient would pass on."""

    def __init__(self, wait):
        super().__init__()
        self.wait = wait

    def forward(self, x):
        self.ctx = x.context  # MXNet hands backward arrays that all claim to be on cpu(0)
        return x.copy()

    def backward(self, dy):
        return self.wait(dy.copy(), self.ctx)


@pytest.mark.cpu("the one-pass update is for CPU contexts")
def test_the_last_layer_is_updated_while_backward_computes_the_first(monkeypatch):
    """The first layer's backward, on device 0's worker, waits for the last layer's update.

    Each layer is a bucket of its own. If the update were queued behind backward, this would wait in
    vain. Device 1's forward waits until it is held: the last layer's sum cannot be earlier.
    """
    width, ctx, rule = 400, contexts(2), optim.rule
    updated, held, in_time = threading.Event(), threading.Event(), []

    def telling(*args, **more):
        apply = rule(*args, **more)
        return lambda *arrays: (apply(*arrays), updated.set())

    def hold():
        held.set()
        in_time.append(updated.wait(60))

    def backward(dy, ctx):
        if ctx == device(0):
            engine.push(hold, ctx, writes=[dy])
        return dy

    def model(x, params):
        W1, b1, W2, b2 = params
        h = mx.nd.FullyConnected(x, W1, b1, num_hidden=width)
        if h.context == device(1):
            engine.push(lambda: held.wait(600), device(1), writes=[h])
        h = mx.nd.tanh(Waiting(backward)(h))
        return mx.nd.FullyConnected(h, W2, b2, num_hidden=width)

    layer_bytes = 4 * (width**2 + width)
    assert 2 * len(ctx) * layer_bytes > threads.BYTES_INLINE
    monkeypatch.setattr(replicas, "BUCKET_BYTES", layer_bytes)
    monkeypatch.setattr(optim, "rule", telling)
    # After the steps 1, 2, 4, ... of a process it reads all gradients, before the updates.
    monkeypatch.setattr(heap, "end_step", lambda after: None)
    rng = np.random.RandomState(0)
    params = [rng.normal(scale=0.05, size=shape) for shape in [(width, width), (width,)] * 2]
    device_params = replicas_of(params, ctx)
    assert len(replicas.buckets(replicas.trained(device_params))) == 2
    X, y = rng.normal(size=(6, width)).astype("float32"), rng.randint(0, 10, size=6)
    gluonpar.train_batch(X, y, device_params, ctx, 0.1, model)
    mx.nd.waitall()
    assert in_time == [True]


NOTHING = {"X": np.zeros((0, 1, 28, 28), "float32"), "y": np.zeros(0, "float32")}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (NOTHING, "at least 1 sample, got 0"),
        ({"y": np.zeros(3, "float32")}, r"batch\[0\] of shape \(4, .*batch\[1\] of shape \(3,\)"),
        *(({"lr": lr}, f"lr must be .* {lr}") for lr in (0, -0.1, math.nan, math.inf)),
        *(({"lr": lr}, "lr must be ") for lr in ("0.1", None, mx.nd.array([0.1]))),
        ({"lr": 1e39}, r"lr must be .* 1e\+39"),  # infinite in float32
        ({"ctx": contexts(1)}, r"got 2 for 1 contexts \[[cg]pu\(0\)\]"),
        ({"ctx": contexts(3)}, "got 2 for 3 contexts"),
        ({"ctx": contexts(2)[::-1]}, r"parameter 0 must be on [cg]pu\(1\), .* [cg]pu\(0\)"),
        *(({"batch_size": n}, f"batch_size must be .* {n}") for n in (0, -4)),
        *(({"weights": w}, "weights=") for w in ([1], [1, 0], [1, float("inf")], [1, 2, 3])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_refused_and_changes_no_parameter(changed, words):
    X, y = make_batches(4)[0]
    device_params = replicas_of(start(), contexts(2))
    arguments = {"X": X, "y": y.astype("float32"), "ctx": contexts(2), "lr": LR, **changed}
    with pytest.raises(ValueError, match=words):
        gluonpar.train_batch(device_params=device_params, **arguments)
    for params in device_params:
        for param, before in zip(params, start()):
            np.testing.assert_array_equal(param.asnumpy(), before)


def test_gradients_to_which_backward_adds_are_refused():
    X, y = make_batches(4)[0]
    device_params = replicas_of(start(), contexts(2))
    for params in device_params:
        params[0].attach_grad("add")
    with pytest.raises(ValueError, match="grad_req"):
        gluonpar.train_batch(X, y.astype("float32"), device_params, contexts(2), LR)
    assert (device_params[0][0].asnumpy() == start()[0]).all()


@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_a_step_inside_record_is_not_recorded(algorithm):
    """What the caller records keeps its gradient, and the step's bits are those of one outside."""
    ctx, ((X, y), *_) = contexts(2), make_batches(4)
    outside, inside = (replicas_of(start(), ctx) for _ in range(2))
    gluonpar.train_batch(X, y.astype("float32"), outside, ctx, LR, algorithm=algorithm)
    mine = mx.nd.ones((1,), ctx=ctx[0])
    mine.attach_grad()
    with mx.autograd.record():
        loss = mine * 3
        gluonpar.train_batch(X, y.astype("float32"), inside, ctx, LR, algorithm=algorithm)
        loss = loss * 2
    loss.backward()
    assert mine.grad.asscalar() == 6
    for one, other in zip(sum(outside, []), sum(inside, [])):
        assert (one.asnumpy() == other.asnumpy()).all()
