"""Tracing a plain function: the same numbers as operator by operator, for any shape and device."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

import gluonpar
from gluonpar import graph
from gluonpar.losses import softmax_cross_entropy
from gluonpar.train import pixel_lenet


def losses_and_grads(way, X, y, ctx):
    params = gluonpar.get_params(PARAMS, ctx)
    with autograd.record():
        losses = way(X.copyto(ctx), y.copyto(ctx), params)
    losses.backward()
    return [losses.asnumpy(), *[param.grad.asnumpy() for param in params]]


def traced(X, y, params):
    return graph.losses(pixel_lenet, softmax_cross_entropy, X, y, params)


def plain(X, y, params):
    return softmax_cross_entropy(pixel_lenet(X, params), y)


PARAMS = gluonpar.init_lenet(0.1)


def test_one_graph_serves_changing_batch_sizes_and_devices():
    rng = np.random.RandomState(0)
    for n, device in ((8, 0), (8, 1), (3, 0), (1, 2), (8, 0), (3, 1)):
        X = mx.nd.array(rng.randint(0, 256, (n, 1, 28, 28)), dtype="uint8")
        y = mx.nd.array(rng.randint(0, 10, n))
        pairs = zip(*(losses_and_grads(way, X, y, mx.cpu(device)) for way in (traced, plain)))
        for got, want in pairs:
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_losses_of_one_step_outlive_the_next():
    """The memory of a traced graph is planned once; what it returns must not be overwritten."""
    X = mx.nd.random.randint(0, 256, (4, 1, 28, 28)).astype("uint8")
    y = mx.nd.array([1, 2, 3, 4])
    params = gluonpar.get_params(PARAMS, mx.cpu(0))
    kept = []
    for _ in range(3):
        with autograd.record():
            kept.append(traced(X, y, params))
        kept[-1].backward()
        gluonpar.sgd(params, 0.1, 4)
    values = [losses.asnumpy() for losses in kept]
    np.testing.assert_allclose(values[0], plain(X, y, PARAMS).asnumpy(), rtol=1e-5)
    assert (values[0] != values[1]).all() and (values[1] != values[2]).all()


def test_a_function_that_is_not_traceable_runs_operator_by_operator():
    seen = []

    def model(X, params):
        seen.append(type(X))
        return X * params[0]

    X = mx.nd.ones((2, 3))
    got = graph.losses(model, softmax_cross_entropy, X, mx.nd.zeros(2), [mx.nd.ones((1,))])
    assert seen == [mx.nd.NDArray]
    np.testing.assert_allclose(got.asnumpy(), np.log([3, 3]), rtol=1e-6)


def test_operators_fit_the_argument():
    assert graph.operators(mx.sym.var("x")) is mx.sym
    assert graph.operators(mx.nd.ones((1,))) is mx.nd


@pytest.mark.parametrize("wrong", [lambda X, params: X.shape, lambda X, params: X + X.size])
def test_looking_at_a_shape_is_an_error_and_not_a_wrong_graph(wrong):
    with pytest.raises(Exception, match="shape|size|ymbol"):
        graph.losses(
            graph.traceable(wrong), softmax_cross_entropy, mx.nd.ones((1, 2)), mx.nd.zeros(1), []
        )
