"""sgd: param -= lr * grad / batch_size, and nothing else."""

import os
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gluonpar.optim import sgd


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


@pytest.mark.parametrize("batch_size", [1, 2, 8, 256])
def test_it_divides_by_the_batch_size_exactly(batch_size):
    # Powers of two: every operation is exact, so any other divisor shows in the last bit.
    weights, grads = [[512.0, -1024.0], [3.0]], [[256.0, 2048.0], [-768.0]]
    params = params_of(weights, grads)
    sgd(params, 0.5, batch_size)
    for param, weight, grad in zip(params, weights, grads):
        expected = np.float32(weight) - np.float32(grad) / 2 / batch_size
        np.testing.assert_array_equal(param.asnumpy(), expected)


def test_updates_are_in_place_and_leave_the_gradients():
    params = params_of([[1.0, 2.0]], [[3.0, 4.0]])
    [param] = params
    assert sgd(params, 1.0, 1) is None
    assert params[0] is param
    assert param.asnumpy().tolist() == [-2.0, -2.0]
    assert param.grad.asnumpy().tolist() == [3.0, 4.0]


def test_one_devices_update_leaves_the_others_alone():
    first, second = (params_of([[1.0]], [[1.0]], ctx=mx.cpu(i)) for i in (0, 1))
    sgd(second, 1.0, 1)
    assert first[0].asscalar() == 1.0
    assert second[0].asscalar() == 0.0
    assert second[0].context == mx.cpu(1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes_are_kept(dtype):
    [param] = params_of([[1.0, 2.0]], [[4.0, 8.0]], dtype)
    sgd([param], 0.5, 2)
    assert np.dtype(param.dtype) == dtype
    assert param.asnumpy().tolist() == [0.0, 0.0]


def test_a_zero_gradient_moves_nothing():
    params = params_of(draw(0, [(3, 4)]), [np.zeros((3, 4))])
    before = params[0].asnumpy()
    sgd(params, 0.2, 7)
    np.testing.assert_array_equal(params[0].asnumpy(), before)


# In a process of its own: MXNet's fused operator writes past its end beyond 60 parameters.
SIXTY_TWO = """
import gluonpar, mxnet as mx
params = [mx.nd.array([i]) for i in range(62)]
for i, param in enumerate(params):
    param.attach_grad()
    param.grad[:] = 2 * i
gluonpar.sgd(params, 1.0, 1)
assert [param.asscalar() for param in params] == [-i for i in range(62)]
"""


def test_a_resnets_62_parameters_are_all_updated():
    path = os.pathsep.join(sys.path)
    process = subprocess.run(
        [sys.executable, "-c", SIXTY_TWO],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=60,
    )
    assert process.returncode == 0
