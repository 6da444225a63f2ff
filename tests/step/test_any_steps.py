"""Programs of any steps: whatever is done between them, K devices train as one.

Each event of a drawn program is done by MXNet alone on one device, and on K devices by train_batch
or by hand.
"""

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from mxnet import autograd

import gluonpar
from gluonpar import operators, replicas, traceable
from tests.support.any_program import event
from tests.support.contexts import algorithms, contexts

LR, SHAPES = 0.05, ((3, 4), (1, 4), (1, 4))


def linear(X, params):
    F, (X, W, b, *_) = operators(X), (array.as_nd_ndarray() for array in (X, *params))
    return F.broadcast_add(F.dot(X, W), b)


def scaled(X, params):
    return operators(X).broadcast_mul(linear(X, params), params[2].as_nd_ndarray())


def scaled_above_one(X, params):
    """Shards without a sample above 1 do not use the scale."""
    out, above = linear(X, params), X.as_nd_ndarray()[:, :1] > 1
    return out + above * scaled(X, params) if above.max().asscalar() else out


@traceable
def squares(out, y):
    F = operators(out)
    return F.sum(F.square(F.broadcast_sub(out, y.as_nd_ndarray())), axis=1)


TRACED = [traceable(lambda X, params: linear(X, params)), traceable(lambda X, p: scaled(X, p))]
MODELS = [linear, scaled, scaled_above_one, *TRACED]


def draw(seed, *shapes):
    rng = np.random.RandomState(seed)
    return [rng.normal(0, 0.7, shape).astype("float32") for shape in shapes]


class Side:
    """Copies of the parameters on some devices, and the events of a program."""

    def __init__(self, k):
        array = mx.np.array if mx.util.is_np_array() else mx.nd.array
        self.ctx, params = contexts(k), [array(value) for value in draw(0, *SHAPES)]
        self.copies = [gluonpar.get_params(params, c) for c in self.ctx]

    def train(self, n, model, algorithm, weighted, seed):
        weights = (1, 4, 2, 3)[: len(self.ctx)] if weighted else None
        args = (*draw(seed, (n, 3), (n, 1)), self.copies, self.ctx, LR)
        gluonpar.train_batch(*args, MODELS[model], squares, algorithm, weights)

    def by_hand(self, n, model, is_left_out, seed):
        X, y = draw(seed, (n, 3), (n, 1))
        shards = gluonpar.split_and_load((X, y), self.ctx)
        with autograd.record():
            losses = [
                squares(MODELS[model](X_shard, params), y_shard)
                for (X_shard, y_shard), params in zip(shards, self.copies)
            ]
        autograd.backward(losses)
        gluonpar.allreduce_grads(self.copies)
        for params in () if is_left_out else self.copies:
            gluonpar.sgd(params, LR, n)

    def fail(self, n):
        """A batch whose model raises on the last of the devices that have samples."""
        args = (*draw(n, (n, 3), (n, 1)), self.copies, self.ctx, LR)

        def model(X, params):
            if X.context == self.ctx[:n][-1]:
                raise KeyError
            return linear(X, params)

        with pytest.raises(KeyError):
            gluonpar.train_batch(*args, model, squares)

    def set(self, i, seed):
        for params in self.copies:
            params[i][:] = draw(seed, SHAPES[i])[0]

    def attach_grad(self, i):
        for params in self.copies:
            params[i].attach_grad()

    def freeze(self, i):
        for params in self.copies:
            params[i] = params[i].copy()

    def replace(self, i, which, keeps_gradient):
        """Another array with the same value, on one device, or if ``which`` is None on all."""
        for params in self.copies if which is None else [self.copies[which % len(self.copies)]]:
            before, params[i] = params[i], params[i].copy()
            if before.grad is not None and keeps_gradient:
                autograd.mark_variables([params[i]], [before.grad])
            elif before.grad is not None:
                params[i].attach_grad()

    def move(self, k, kind):
        frozen = [i for i, param in enumerate(self.copies[0]) if param.grad is None]
        self.ctx = contexts(k)
        self.copies = [kind(gluonpar.get_params(self.copies[0], c, frozen)) for c in self.ctx]


class Alone(Side):
    """What is compared with: MXNet alone, on one device."""

    def train(self, n, model, algorithm, weighted, seed):
        X, y = (mx.nd.array(array, self.ctx[0]) for array in draw(seed, (n, 3), (n, 1)))
        trained = [param for param in self.copies[0] if param.grad is not None]
        for param in trained:
            param.grad[:] = 0
        with autograd.record():
            losses = squares(MODELS[model](X, self.copies[0]), y)
        losses.backward()
        for param in trained:
            param[:] = param - LR / n * param.grad

    def by_hand(self, n, model, is_left_out, seed):
        if not is_left_out:
            self.train(n, model, None, False, seed)

    def fail(self, n):
        pass

    def move(self, k, kind):
        pass


def check(k, numpy, program):
    with mx.util.np_shape(numpy), mx.util.np_array(numpy):
        want, got = Alone(1), Side(k)
        for name, arguments in program:
            for side in (want, got):
                getattr(side, name)(*arguments)
            for param, *copies in zip(want.copies[0], *got.copies):
                first, *others = (copy.asnumpy() for copy in copies)
                np.testing.assert_allclose(first, param.asnumpy(), 1e-4, 1e-5)
                for other in others:
                    np.testing.assert_array_equal(other, first)


SIZES, SEEDS, DEVICES = st.sampled_from((1, 2, 3, 5, 8)), st.integers(0, 99), st.integers(1, 4)
ALGORITHMS = st.one_of(st.none(), st.sampled_from(algorithms()))
HOW = st.integers(0, len(MODELS) - 1), ALGORITHMS, st.booleans()
EVENTS = [
    *[event("train", SIZES, *HOW, SEEDS) for _ in range(5)],  # the same object would count once
    *[event("by_hand", st.sampled_from((1, 8)), HOW[0], st.booleans(), SEEDS) for _ in range(4)],
    event("fail", SIZES),
    event("set", st.integers(0, 2), SEEDS),
    event("attach_grad", st.integers(0, 2)),
    event("freeze", st.integers(1, 2)),
    event("replace", st.integers(0, 2), st.one_of(st.none(), st.integers(0, 3)), st.booleans()),
    event("move", DEVICES, st.sampled_from((list, replicas.Replica))),
]


@pytest.mark.parametrize("num_programs", [60, pytest.param(150, marks=pytest.mark.slow)])
def test_k_devices_train_as_one(num_programs):
    law = given(DEVICES, st.booleans(), st.lists(st.one_of(EVENTS), min_size=5, max_size=12))(check)
    seed(num_programs)(settings(max_examples=num_programs, database=None)(law))()
