"""Random sleeps inside operators: whatever the order things happen in, the bits are the same.

The sleeps are the disturbance, not what makes the tests right: without a race no sleep can change
a result.
"""

import functools
import random
import threading
import time

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from gluonpar import replicas
from gluonpar.runtime import engine, threads
from tests.support.contexts import device

NUM_DEVICES, NUM_STEPS, BATCH_SIZE, LR = 4, 20, 16, 0.3
CTX = [device(i) for i in range(NUM_DEVICES)]
SHAPES = [(12, 10), (12,), (9, 12), (9,), (5, 9), (5,)]


class Sleeper:
    """Sleeps of 0 to 2 ms, or none, from a seeded generator; any thread may call it."""

    def __init__(self, seed, most=0.002):
        self._random, self._lock, self._most = random.Random(seed), threading.Lock(), most
        self.count = 0

    def sleep(self):
        with self._lock:
            self.count += 1
            seconds = self._random.uniform(0, self._most)
        if seconds:
            time.sleep(seconds)


class Disturbed(mx.autograd.Function):
    """The same values and gradients, late: once on a thread of its own, once on the worker."""

    def __init__(self, sleeper):
        super().__init__()
        self.sleeper = sleeper

    def _late(self, array):
        copy = array.copy()
        engine.push(self.sleeper.sleep, self.ctx, writes=[copy])
        return copy

    def forward(self, x):
        self.ctx = x.context  # MXNet hands backward arrays that all claim to be on cpu(0)
        return self._late(x)

    def backward(self, dy):
        self.sleeper.sleep()
        return self._late(dy)


def model(sleeper, x, params):
    """Three dense layers, with a disturbance after each."""
    for i in range(0, len(params), 2):
        W, b = params[i : i + 2]
        x = mx.nd.FullyConnected(x, W, b, num_hidden=W.shape[0])
        x = Disturbed(sleeper)(x)
        if i + 2 < len(params):
            x = mx.nd.tanh(x)
    return x


def make_batches():
    rng = np.random.RandomState(0)
    for step in range(NUM_STEPS):
        n = BATCH_SIZE if step % 5 else 3  # now and then too few for all devices
        yield rng.normal(size=(n, 10)).astype("float32"), rng.randint(0, 5, size=n)


def start():
    rng = np.random.RandomState(1)
    return [mx.nd.array(rng.normal(scale=0.4, size=shape)) for shape in SHAPES]


def train(sleeper, algorithm=None):
    """The parameters of all devices after all steps, with no wait in between."""
    device_params = [gluonpar.get_params(start(), c) for c in CTX]
    disturbed = functools.partial(model, sleeper)
    losses = [
        loss
        for X, y in make_batches()
        for loss in gluonpar.train_batch(
            X, y, device_params, CTX, LR, model=disturbed, algorithm=algorithm
        )
    ]
    values = [[param.asnumpy() for param in params] for params in device_params]
    return values, [loss.asnumpy() for loss in losses]


def disturb_pushes(monkeypatch, sleeper):
    """gluonpar's own operators of the engine sleep before, or after, they do their work."""
    prepare = engine.prepare

    def disturbed(ctx, **more):
        push = prepare(ctx, **more)

        def push_late(function):
            def late():
                sleeper.sleep()
                function()
                sleeper.sleep()

            push(late)

        return push_late

    monkeypatch.setattr(engine, "prepare", disturbed)


@pytest.fixture(scope="module")
def calm():
    """Parameters and losses by algorithm, without sleeps."""
    return functools.lru_cache(None)(lambda algorithm: train(Sleeper(0, 0), algorithm))


def assert_same_bits(got, want):
    (params, losses), (calm_params, calm_losses) = got, want
    for mine, others in zip(params, calm_params):
        for a, first, b in zip(mine, params[0], others):
            np.testing.assert_array_equal(a, first)
            np.testing.assert_array_equal(a, b)
    for a, b in zip(losses, calm_losses):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", ["at once", "beside", "beside, a bucket a layer", "ring"])
def test_no_sleep_anywhere_changes_a_bit(monkeypatch, calm, way, seed):
    algorithm = "ring" if way == "ring" else None
    want = calm(algorithm)
    if "beside" in way:
        monkeypatch.setattr(threads, "BYTES_INLINE", 0)
    if "bucket" in way:
        monkeypatch.setattr(replicas, "BUCKET_BYTES", 4 * (12 * 10 + 12))
    sleeper = Sleeper(seed)
    disturb_pushes(monkeypatch, sleeper)
    assert_same_bits(train(sleeper, algorithm), want)
    assert sleeper.count > NUM_STEPS * NUM_DEVICES * 3
    moved = [(a != b.asnumpy()).any() for a, b in zip(want[0][0], start())]
    assert moved == [True] * len(SHAPES)
