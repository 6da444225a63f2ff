"""sgd: param -= lr * grad / batch_size, and nothing else."""

import math

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gluonpar.collectives import host
from gluonpar.optim import sgd
from gluonpar.replicas import get_params
from tests.support.contexts import device
from tests.support.processes import run_fork


def params_of(weights, grads, dtype="float32", ctx=None):
    params = [mx.nd.array(weight, dtype=dtype, ctx=ctx) for weight in weights]
    for param, grad in zip(params, grads):
        param.attach_grad()
        param.grad[:] = mx.nd.array(grad, dtype=dtype, ctx=param.context)
    return params


def draw(seed, shapes):
    rng = np.random.RandomState(seed)
    return [rng.normal(size=shape) for shape in shapes]


@settings(deadline=None, max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=10),
    lr=st.floats(1e-4, 10),
    batch_size=st.integers(1, 1000),
)
def test_it_is_the_rule_in_numpy(shapes, lr, batch_size):
    weights, grads = draw(0, shapes), draw(1, shapes)
    params = params_of(weights, grads)
    sgd(params, lr, batch_size)
    for param, weight, grad in zip(params, weights, grads):
        step = lr * grad / batch_size
        tolerance = 1e-6 * (np.abs(weight) + np.abs(step))
        assert (np.abs(param.asnumpy() - (weight - step)) <= tolerance).all()


# In a process of its own: MXNet's multi_sgd_update writes past its end beyond 60 parameters.
SIXTY_TWO = """
import gluonpar, mxnet as mx, sys
from gluonpar.collectives import host
if sys.argv[1] == "operator":
    host.on_host = lambda ctx: False
params = [mx.nd.array([i]) for i in range(62)]
for i, param in enumerate(params):
    param.attach_grad()
    param.grad[:] = 2 * i
gluonpar.sgd(params, 1.0, 1)
assert [param.asscalar() for param in params] == [-i for i in range(62)]
"""


@pytest.mark.parametrize("by", ["host", "operator"])
def test_a_resnets_62_parameters_are_all_updated(by):
    run_fork(SIXTY_TWO, by)


@pytest.fixture(params=["host", "operator"])
def by(request, monkeypatch):
    """Both ways of the update: NumPy on the host, and the operator that GPUs take."""
    if request.param == "operator":
        monkeypatch.setattr(host, "on_host", lambda ctx: False)
    return request.param


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("make", [list, lambda params: get_params(params, device(1))])
def test_both_ways_are_the_rule(by, make, dtype):
    """Powers of two: exact whichever way, in any dtype; in a plain list and in a Replica."""
    params = make(params_of([[512.0, -1024.0], [3.0]], [[0.0, 0.0], [0.0]], dtype))
    for param, grad in zip(params, ([256.0, 2048.0], [-768.0])):
        param.grad[:] = mx.nd.array(grad, dtype=dtype)
    sgd(params, 0.5, 8)
    assert [param.asnumpy().tolist() for param in params] == [[496.0, -1152.0], [51.0]]
    assert params[0].grad.asnumpy().tolist() == [256.0, 2048.0]


@pytest.mark.parametrize("lr", [math.nan, math.inf, -math.inf, 1e39, "0.1", None])
def test_a_rate_that_is_not_finite_changes_nothing(lr):
    [param] = params_of([[1.0]], [[1.0]])
    with pytest.raises(ValueError, match="lr must be a finite number"):
        sgd([param], lr, 1)
    sgd([param], 0, 1)  # as a schedule may end
    assert param.asscalar() == 1


def test_parameters_without_gradient_or_elements_stay(by):
    [frozen] = params_of([[5.0]], [[1.0]])
    frozen = frozen.copy()
    with mx.util.np_shape(True):
        empty = mx.nd.zeros((0, 2))
        empty.attach_grad()
        [param] = params_of([[1.0]], [[1.0]])
        sgd([frozen, empty, param], 1.0, 1)
        assert (frozen.asscalar(), empty.shape, param.asscalar()) == (5.0, (0, 2), 0.0)
        assert sgd([frozen, empty], 1.0, 1) is None
        assert sgd([], 1.0, 1) is None
