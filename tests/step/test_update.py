"""The step's all-reduce and update: every way of doing them gives the same parameters."""

import mxnet as mx
import numpy as np
import pytest
from contexts import algorithms, device

from gluonpar import replicas, step
from gluonpar.collectives.exchange import Exchange
from gluonpar.replicas import get_params
from gluonpar.runtime import threads

OTHERS = sorted(set(algorithms()) - {"host"})
SHAPES = [(3, 4), (5,), (2, 2, 2), (1,)]
MIXED = ["float32", "float16", "float64", "float32"]
LR, BATCH_SIZE = 0.3, 7


def allreduce_sgd(device_params, lr, batch_size, algorithm=None):
    """The last two lines of train_batch."""
    exchange = Exchange([params[0].context for params in device_params], algorithm)
    step.allreduce_sgd(exchange, replicas.buckets(device_params), lr, batch_size)


def draw(k, seed=0):
    """Parameters, and every device's gradients for them, float64."""
    rng = np.random.RandomState(seed)
    weights = [rng.normal(size=shape) for shape in SHAPES]
    return weights, [[rng.normal(size=shape) for shape in SHAPES] for _ in range(k)]


def plain_list(params, ctx):
    copies = [param.copyto(ctx) for param in params]
    for copy in copies:
        copy.attach_grad()
    return copies


def mixture(params, ctx):
    return (plain_list if ctx.device_id % 2 else get_params)(params, ctx)


def place(make, weights, grads, dtypes=("float32",) * 4, array=mx.nd.array):
    """Every device's parameters, made by ``make(params, ctx)``, with the gradients given."""
    params = [array(w, dtype=dtype) for w, dtype in zip(weights, dtypes)]
    device_params = [make(params, device(i)) for i in range(len(grads))]
    for copies, of_device in zip(device_params, grads):
        for copy, grad in zip(copies, of_device):
            if copy.grad is not None:
                copy.grad[:] = array(grad, dtype=copy.dtype, ctx=copy.context)
    return device_params


def rounded(values, dtypes):
    return [value.astype(dtype).astype("float64") for value, dtype in zip(values, dtypes)]


def assert_updated(device_params, weights, grads, rtol=1e-6):
    """By the float64 oracle, from what each dtype holds; and to the same bits on all devices."""
    dtypes = [param.dtype for param in device_params[0]]
    weights, grads = rounded(weights, dtypes), [rounded(own, dtypes) for own in grads]
    for i, (param, weight) in enumerate(zip(device_params[0], weights)):
        steps = [LR * own[i] / BATCH_SIZE for own in grads]
        tolerance = 4e-3 if param.dtype == np.float16 else rtol
        bound = tolerance * (np.abs(weight) + sum(map(np.abs, steps)))
        got = param.asnumpy().astype("float64")
        assert (np.abs(got - (weight - sum(steps))) <= bound).all(), f"parameter {i}"
        assert (got != weight).any()
        for copies in device_params[1:]:
            np.testing.assert_array_equal(copies[i].asnumpy(), param.asnumpy())


def assert_grads(device_params, want, rtol):
    for copies, of_device in zip(device_params, want):
        for copy, grad in zip(copies, of_device):
            limit = 4e-3 if copy.dtype == np.float16 else rtol
            np.testing.assert_allclose(copy.grad.asnumpy(), grad, rtol=limit, atol=3 * limit)


@pytest.mark.cpu("the one-pass update is for CPU contexts")
@pytest.mark.parametrize("make", [get_params, plain_list, mixture])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("algorithm", [None, "host"])
def test_fused_is_the_oracle_and_leaves_the_gradients(algorithm, k, make):
    weights, grads = draw(k)
    device_params = place(make, weights, grads)
    allreduce_sgd(device_params, LR, BATCH_SIZE, algorithm)
    assert_updated(device_params, weights, grads)
    assert_grads(device_params, [rounded(own, ["float32"] * 4) for own in grads], rtol=0)


@pytest.mark.parametrize("make", [get_params, plain_list, mixture])
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("algorithm", OTHERS)
def test_other_algorithms_give_the_same_and_leave_the_sums(algorithm, k, make):
    weights, grads = draw(k)
    device_params = place(make, weights, grads)
    allreduce_sgd(device_params, LR, BATCH_SIZE, algorithm)
    assert_updated(device_params, weights, grads)
    sums = [sum(of_param) for of_param in zip(*grads)]
    assert_grads(device_params, [sums] * k, rtol=1e-6)


@pytest.mark.parametrize("make", [get_params, plain_list, mixture])
@pytest.mark.parametrize("algorithm", [None, *OTHERS])
def test_parameters_of_several_dtypes(algorithm, make):
    weights, grads = draw(3)
    device_params = place(make, weights, grads, MIXED)
    allreduce_sgd(device_params, LR, BATCH_SIZE, algorithm)
    assert [np.dtype(param.dtype).name for param in device_params[2]] == MIXED
    assert_updated(device_params, weights, grads)


@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_numpy_arrays(algorithm):
    weights, grads = draw(2)
    device_params = place(get_params, weights, grads, array=mx.np.array)
    allreduce_sgd(device_params, LR, BATCH_SIZE, algorithm)
    assert all(isinstance(param, mx.np.ndarray) for param in device_params[1])
    assert_updated(device_params, weights, grads)


@pytest.mark.parametrize("bucket_bytes", [1, 52, 60])
@pytest.mark.parametrize("algorithm", [None, "star"])
def test_however_the_parameters_fall_into_buckets(monkeypatch, bucket_bytes, algorithm):
    monkeypatch.setattr(replicas, "BUCKET_BYTES", bucket_bytes)
    weights, grads = draw(3)
    device_params = place(get_params, weights, grads)
    allreduce_sgd(device_params, LR, BATCH_SIZE, algorithm)
    assert_updated(device_params, weights, grads)


def test_parameters_without_elements_are_passed_over():
    with mx.util.np_shape(True):
        params = [mx.np.zeros((0, 3)), mx.np.ones((2,)), mx.np.array(1.0)]
        for algorithm in (None, "ring"):
            device_params = [get_params(params, device(i)) for i in range(2)]
            for copies in device_params:
                copies[1].grad[:] = 1
                copies[2].grad[()] = 2
            allreduce_sgd(device_params, 0.5, 2, algorithm)
            for copies in device_params:
                copies[0].wait_to_read()
                assert copies[0].shape == (0, 3)
                assert copies[1].asnumpy().tolist() == [0.5, 0.5]
                assert copies[2].asnumpy() == 0


def values_of(device_params):
    return [array.asnumpy() for params in device_params for p in params for array in (p, p.grad)]


def refused(device_params, words, algorithm=None):
    before = values_of(device_params)
    with pytest.raises(ValueError, match=words):
        allreduce_sgd(device_params, LR, BATCH_SIZE, algorithm)
    for array, value in zip(values_of(device_params), before):
        np.testing.assert_array_equal(array, value)


@pytest.mark.parametrize("k", [1, 2])
def test_an_unknown_algorithm_changes_nothing(k):
    device_params = place(get_params, *draw(k))
    refused(device_params, "algorithm must be one of .*ring.* got 'rnig'", "rnig")


@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_gradients_that_cannot_be_summed_change_nothing(algorithm):
    weights, grads = draw(2)
    device_params = place(plain_list, weights, grads)
    device_params[1][0].attach_grad(stype="row_sparse")
    refused(device_params, r"gradients\[1\] .* row_sparse", algorithm)
    device_params = place(plain_list, weights, grads)
    device_params[1][0] = device_params[1][0].astype("float64")
    device_params[1][0].attach_grad()
    refused(device_params, r"gradients\[1\] on [cg]pu\(1\) .*float64", algorithm)


@pytest.mark.cpu("the one-pass update is for CPU contexts")
def test_one_operator_per_bucket_and_the_last_layers_first(monkeypatch):
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 52)
    pushed, push = [], threads.push

    def note(function, arrays, *more, **name):
        pushed.append([array.size for array in arrays])
        push(function, arrays, *more, **name)

    monkeypatch.setattr(threads, "push", note)
    allreduce_sgd(place(get_params, *draw(2)), LR, BATCH_SIZE)
    assert pushed == [[1] * 4 + [8] * 4, [5] * 4, [12] * 4]
