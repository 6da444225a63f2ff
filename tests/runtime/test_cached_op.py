"""Tracing a plain function: each replica has graphs of its own, and what they return is kept."""

import gc
import weakref

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

import gluonpar
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.runtime import cached_op, memory
from gluonpar.training.workloads import pixel_lenet


def test_losses_of_one_step_outlive_the_next():
    """The memory of a traced graph is planned once; what it returns must not be overwritten."""
    X = mx.nd.random.randint(0, 256, (4, 1, 28, 28)).astype("uint8")
    y = mx.nd.array([1, 2, 3, 4])
    start = gluonpar.init_lenet(0.1)
    params = gluonpar.get_params(start, mx.cpu(0))
    kept = []
    for _ in range(3):
        with autograd.record():
            kept.append(cached_op.losses(pixel_lenet, softmax_cross_entropy, X, y, params))
        kept[-1].backward()
        gluonpar.sgd(params, 0.1, 4)
    values = [losses.asnumpy() for losses in kept]
    first = softmax_cross_entropy(pixel_lenet(X, start), y).asnumpy()
    np.testing.assert_allclose(values[0], first, rtol=1e-5)
    assert (values[0] != values[1]).all() and (values[1] != values[2]).all()


def test_a_function_that_is_not_traceable_runs_operator_by_operator():
    seen = []

    def model(X, params):
        seen.append(type(X))
        return X * params[0]

    X = mx.nd.ones((2, 3))
    got = cached_op.losses(model, softmax_cross_entropy, X, mx.nd.zeros(2), [mx.nd.ones((1,))])
    assert seen == [mx.nd.NDArray]
    np.testing.assert_allclose(got.asnumpy(), np.log([3, 3]), rtol=1e-6)


@pytest.mark.parametrize("wrong", [lambda X, params: X.shape, lambda X, params: X + X.size])
def test_reading_a_shape_is_an_error_and_not_a_wrong_graph(wrong):
    X, y, model = mx.nd.ones((1, 2)), mx.nd.zeros(1), cached_op.traceable(wrong)
    with pytest.raises(Exception, match="shape|size|ymbol"):
        cached_op.losses(model, softmax_cross_entropy, X, y, gluonpar.get_params([], mx.cpu(0)))


@cached_op.traceable
def linear(X, params):
    F = cached_op.operators(X)
    return F.FullyConnected(X, params[0], params[1], num_hidden=3)


def start(seed=0):
    rng = np.random.RandomState(seed)
    return [mx.nd.array(rng.normal(size=shape)) for shape in ((3, 4), (3,))]


def batch(number, ctx):
    rng = np.random.RandomState(100 + number)
    X, y = rng.normal(size=(5, 4)), rng.randint(0, 3, size=5)
    return mx.nd.array(X, ctx=ctx), mx.nd.array(y, ctx=ctx)


def forward(params, number, model=linear):
    with autograd.record():
        data = batch(number, params[0].context)
        return cached_op.losses(model, softmax_cross_entropy, *data, params)


def grads_of(params):
    return [param.grad.asnumpy() for param in params if param.grad is not None]


def step(params, number, model=linear):
    """Do one step of SGD; return the gradients."""
    forward(params, number, model).backward()
    grads = grads_of(params)
    gluonpar.sgd(params, 0.5, 5)
    return grads


def train_alone(seed=0, ctx=None):
    """Return the gradients of every step, and the parameters after the last."""
    params = gluonpar.get_params(start(seed), ctx or mx.cpu(0))
    seen = [step(params, number) for number in range(4)]
    return [*seen, [param.asnumpy() for param in params]]


def assert_same_bits(got, want):
    assert [len(arrays) for arrays in got] == [len(arrays) for arrays in want]
    for a, b in zip(sum(got, []), sum(want, [])):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("devices", [(0, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("together", [False, True])
def test_two_replicas_trained_in_turns_are_each_trained_alone(devices, together):
    """A static graph keeps writing its first gradients. Also where both run before backward."""
    both = [gluonpar.get_params(start(seed), mx.cpu(c)) for seed, c in enumerate(devices)]
    attached = [[memory.chunk(param.grad) for param in params] for params in both]
    seen = [[], []]
    for number in range(4):
        if together:
            autograd.backward([forward(params, number) for params in both])
        else:
            for params in both:
                forward(params, number).backward()
        for params, of_one in zip(both, seen):
            of_one.append(grads_of(params))
            gluonpar.sgd(params, 0.5, 5)
    assert [[memory.chunk(param.grad) for param in params] for params in both] == attached
    for seed, (c, params, of_one) in enumerate(zip(devices, both, seen)):
        values = [param.asnumpy() for param in params]
        assert_same_bits([*of_one, values], train_alone(seed, mx.cpu(c)))


@pytest.mark.parametrize("replace", [False, True], ids=["new gradient", "new array"])
@pytest.mark.parametrize("which", [0, 1])
def test_one_parameter_may_get_a_new_gradient_or_be_replaced(which, replace):
    params = gluonpar.get_params(start(), mx.cpu(0))
    seen = [step(params, 0)]
    old = params[which].grad
    before = old.asnumpy()
    if replace:
        params[which] = params[which].copy()
    params[which].attach_grad()
    seen += [step(params, number) for number in range(1, 4)]
    assert_same_bits([*seen, [p.asnumpy() for p in params]], train_alone())
    np.testing.assert_array_equal(old.asnumpy(), before)


def test_a_model_is_traced_once_per_replica_and_its_graph_is_freed_with_the_replica():
    params = gluonpar.get_params(start(), mx.cpu(0))
    for number in range(5):
        step(params, number)
    assert len(params.graphs) == 1
    step(params, 5, cached_op.traceable(lambda X, params: linear(X, params)))
    kept = [*map(weakref.ref, params.graphs.values())]
    del params
    gc.collect()
    assert [graph() for graph in kept] == [None, None]
