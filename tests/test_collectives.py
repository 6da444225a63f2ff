"""Laws of every collective: the exact sum, the same bits everywhere, in place, in order."""

import threading

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mxnet import autograd

import gluonpar
from gluonpar import collectives

ALGORITHMS = sorted(collectives.ALGORITHMS)
DTYPES = ["float16", "float32", "float64", "int8", "int32", "int64", "uint8"]
SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


def payload(k, shape, dtype="float32"):
    """One array a device; small integers, different in every cell as far as the dtype has them."""
    size = int(np.prod(shape, dtype=int))
    cells = np.arange(k * size).reshape((k, *shape))
    largest = 127 // k if np.dtype(dtype).itemsize == 1 else 2047 // k
    return (cells % (largest + 1)).astype(dtype)


def place(values, array=mx.nd.array):
    return [array(v, ctx=mx.cpu(i), dtype=v.dtype) for i, v in enumerate(values)]


def equal_everywhere(data, want):
    for i, array in enumerate(data):
        assert array.context == mx.cpu(i)
        np.testing.assert_array_equal(array.asnumpy(), want)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("k", range(1, 10))
def test_every_device_ends_with_the_exact_sum(algorithm, k):
    values = payload(k, (5, 3))
    data = place(values)
    assert gluonpar.allreduce(data, algorithm) is None
    equal_everywhere(data, values.sum(axis=0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=40, deadline=None)
@given(k=st.integers(1, 8), shape=SHAPES.filter(len), dtype=st.sampled_from(DTYPES))
def test_any_shape_and_dtype(algorithm, k, shape, dtype):
    values = payload(k, shape, dtype)
    data = place(values)
    gluonpar.allreduce(data, algorithm)
    equal_everywhere(data, values.sum(axis=0, dtype=dtype))
    assert data[0].dtype == np.dtype(dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("k", [2, 3, 8])
def test_random_floats_are_close_to_float64_and_have_the_same_bits_everywhere(algorithm, k):
    values = np.random.RandomState(k).normal(size=(k, 1000)).astype("float32")
    data = place(values)
    gluonpar.allreduce(data, algorithm)
    np.testing.assert_allclose(
        data[0].asnumpy(), values.sum(axis=0, dtype="float64"), atol=k * 1e-6
    )
    equal_everywhere(data, data[0].asnumpy())
    again = place(values)
    gluonpar.allreduce(again, algorithm)
    equal_everywhere(again, data[0].asnumpy())


def test_numpy_arrays_of_mxnet():
    values = payload(3, (4,))
    data = place(values, mx.np.array)
    gluonpar.allreduce(data)
    equal_everywhere(data, values.sum(axis=0))


def test_several_arrays_on_one_context():
    values = payload(3, (4,))
    data = [mx.nd.array(v, ctx=mx.cpu(0)) for v in values]
    gluonpar.allreduce(data)
    for array in data:
        np.testing.assert_array_equal(array.asnumpy(), values.sum(axis=0))


def test_rows_of_one_array():
    values = payload(3, (4,))
    whole = mx.nd.array(values)
    gluonpar.allreduce([whole[0], whole[1], whole[2]])
    np.testing.assert_array_equal(whole.asnumpy(), [values.sum(axis=0)] * 3)


@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast_copies_the_root(root):
    values = payload(3, (4, 2))
    data = place(values)
    assert gluonpar.broadcast(data, root) is None
    equal_everywhere(data, values[root])


@pytest.mark.parametrize("collective", [gluonpar.allreduce, gluonpar.broadcast])
def test_it_is_ordered_with_the_operators_around_it(collective):
    data = place(payload(4, (1000,)))
    want = [array.asnumpy() for array in data]
    for _ in range(20):
        for array in data:
            array *= 0.5
        collective(data)
        copies = [array + 1 for array in data]
        total = sum(w * 0.5 for w in want) if collective is gluonpar.allreduce else want[0] * 0.5
        want = [total] * 4
    equal_everywhere(data, want[0])
    equal_everywhere(copies, want[0] + 1)


def test_several_threads_reduce_at_once():
    sets = [place(payload(3, (100,))) for _ in range(8)]
    threads = [threading.Thread(target=gluonpar.allreduce, args=(data,)) for data in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for data in sets:
        equal_everywhere(data, payload(3, (100,)).sum(axis=0))


def test_nothing_is_recorded_for_autograd():
    x = mx.nd.ones((2,))
    x.attach_grad()
    data = [mx.nd.ones((2,)), mx.nd.ones((2,), ctx=mx.cpu(1))]
    with autograd.record():
        y = x * 3
        gluonpar.allreduce(data)
        z = y * data[0]
    z.backward()
    np.testing.assert_array_equal(x.grad.asnumpy(), [6, 6])


def test_one_planted_bug_an_algorithm(monkeypatch):
    """star that forgets to send back; star that sums the first device only."""
    whole = collectives.star.plan
    for bug in (lambda k: whole(k)[: k - 1], lambda k: whole(k)[:1] + whole(k)[k - 1 :]):
        monkeypatch.setitem(collectives.ALGORITHMS, "star", bug)
        with pytest.raises(AssertionError):
            test_every_device_ends_with_the_exact_sum("star", 3)


class TestBadInput:
    def test_an_empty_list(self):
        with pytest.raises(ValueError, match="data is an empty list"):
            gluonpar.allreduce([])

    def test_no_list(self):
        with pytest.raises(TypeError, match="data is a NDArray; pass a list"):
            gluonpar.allreduce(mx.nd.ones((2,)))

    def test_no_array(self):
        with pytest.raises(TypeError, match=r"data\[1\] is a ndarray, not an MXNet array"):
            gluonpar.allreduce([mx.nd.ones((2,)), np.ones(2)])

    @pytest.mark.parametrize(
        "other, words",
        [
            (mx.nd.ones((3,), ctx=mx.cpu(1)), r"data\[1\] on cpu\(1\) has shape \(3,\).*\(2,\)"),
            (mx.nd.ones((2,), dtype="float64"), r"data\[1\] .* has dtype float64.*float32"),
            (mx.nd.ones((2,)).tostype("row_sparse"), "has stype row_sparse.*has default"),
        ],
    )
    @pytest.mark.parametrize("collective", [gluonpar.allreduce, gluonpar.broadcast])
    def test_arrays_that_differ(self, collective, other, words):
        first = mx.nd.ones((2,))
        with pytest.raises(ValueError, match=words):
            collective([first, other])
        np.testing.assert_array_equal(first.asnumpy(), [1, 1])

    def test_sparse_arrays(self):
        sparse = mx.nd.ones((2, 2)).tostype("row_sparse")
        with pytest.raises(ValueError, match="row_sparse arrays; call tostype"):
            gluonpar.allreduce([sparse, sparse])

    def test_an_unknown_algorithm(self):
        with pytest.raises(ValueError, match="no all-reduce algorithm 'sun'; there are: .*star"):
            gluonpar.allreduce([mx.nd.ones((2,))], "sun")

    @pytest.mark.parametrize("root", [-1, 2])
    def test_a_root_that_is_not_there(self, root):
        with pytest.raises(ValueError, match=f"root={root} is none of the 2 arrays; use 0 to 1"):
            gluonpar.broadcast([mx.nd.ones((2,)), mx.nd.ones((2,))], root)
