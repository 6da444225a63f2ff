"""replicas: every device has its own parameters and gradients."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from gluonpar import replicas
from gluonpar.replicas import get_params

SHAPES = ((2, 3), (4,))


def values():
    return [np.arange(6, dtype="float32").reshape(2, 3), np.arange(10, 14, dtype="float32")]


def originals(ctx=None):
    return [mx.nd.array(value, ctx=ctx) for value in values()]


def assert_equal(arrays, expected):
    for array, value in zip(arrays, expected):
        np.testing.assert_array_equal(array.asnumpy(), value)


@pytest.mark.parametrize("ctx", [mx.cpu(0), mx.cpu(3)], ids=str)
def test_copies_are_equal_and_on_their_context(ctx):
    copies = get_params(originals(), ctx)
    assert_equal(copies, values())
    assert [copy.context for copy in copies] == [ctx] * 2


@pytest.mark.parametrize("ctx", [mx.cpu(0), mx.cpu(3)], ids=str)
def test_writing_to_a_copy_leaves_the_original(ctx):
    params = originals(mx.cpu(0))
    for copy in get_params(params, ctx):
        copy += 1
    assert_equal(params, values())


def test_writing_to_the_original_leaves_the_copies():
    params = originals()
    copies = get_params(params, mx.cpu(0))
    for param in params:
        param[:] = -1
    assert_equal(copies, values())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes_are_kept(dtype):
    [copy] = get_params([mx.nd.ones((2,), dtype=dtype)], mx.cpu(1))
    assert np.dtype(copy.dtype) == np.dtype(copy.grad.dtype) == dtype


def test_gradients_start_at_zero_on_the_copys_context():
    for copy in get_params(originals(), mx.cpu(2)):
        assert copy.grad.context == mx.cpu(2)
        assert not copy.grad.asnumpy().any()


def test_each_backward_overwrites_the_gradient_of_its_own_copy_only():
    params = originals()
    first, second = (get_params(params, c) for c in (mx.cpu(0), mx.cpu(1)))
    for _ in range(2):
        with autograd.record():
            loss = (first[0] * first[0]).sum()
        loss.backward()
    assert_equal([first[0].grad], [2 * values()[0]])
    assert_equal([second[0].grad], [np.zeros(SHAPES[0])])


def test_zero_grads_zeroes_every_gradient_in_place_and_no_parameter():
    params = get_params(originals(), mx.cpu(1))
    grads = [param.grad for param in params]
    for grad in grads:
        grad[:] = 7
    replicas.zero_grads(params)
    assert not any(grad.asnumpy().any() for grad in grads)
    assert_equal(params, values())


def test_replicas_in_order_pass_the_check():
    ctx = [mx.cpu(0), mx.cpu(1)]
    replicas.check([get_params(originals(), c) for c in ctx], ctx)


def on(*ids):
    return [get_params(originals(), mx.cpu(i)) for i in ids]


@pytest.mark.parametrize(
    ("device_params", "words"),
    [
        (lambda: on(0), r"1 copies .* for 2 contexts \[cpu\(0\), cpu\(1\)\]"),
        (lambda: on(0, 1, 2), "3 copies .* for 2 contexts"),
        (lambda: on(0, 0), r"parameter 0 is on cpu\(0\), but its device is cpu\(1\)"),
        (lambda: on(1, 0), r"parameter 0 is on cpu\(1\), but its device is cpu\(0\)"),
        (lambda: [on(0)[0], on(1)[0][:1]], r"on cpu\(1\) have shapes \[\(2, 3\)\], on cpu\(0\)"),
        (lambda: [on(0)[0], on(1)[0][::-1]], r"on cpu\(1\) have shapes \[\(4,\), \(2, 3\)\]"),
    ],
)
def test_replicas_that_do_not_fit_are_refused_with_their_values(device_params, words):
    with pytest.raises(ValueError, match=words):
        replicas.check(device_params(), [mx.cpu(0), mx.cpu(1)])
