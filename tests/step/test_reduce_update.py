"""update_on_host: one pass over memory gives what a sum, an update and a broadcast would give."""

import threading

import mxnet as mx
import numpy as np
import pytest
from contexts import device

from gluonpar import optim
from gluonpar.optim import Item
from gluonpar.runtime import engine, threads

pytestmark = pytest.mark.cpu("update_on_host works in the memory of CPU contexts")

BLOCK = threads.BLOCK_BYTES // 4  # elements of float32
DTYPES = ["float16", "float32", "float64"]


def draw(seed, shape, dtype="float32"):
    return np.random.RandomState(seed).normal(size=shape).astype(dtype)


def place(values):
    return [mx.nd.array(v, ctx=device(i), dtype=v.dtype) for i, v in enumerate(values)]


def copies(k, value):
    return place([value] * k)


def assert_everywhere(arrays, want):
    for array in arrays:
        np.testing.assert_array_equal(array.asnumpy(), want)


def exact_sgd(total, param):
    param -= total / 4  # exact, if it is on small integers


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4, 5), (1, 1)])
def test_every_copy_is_updated_by_the_exact_sum(k, dtype, shape):
    """Small integers, each gradient's cells its own: every operation is exact in any dtype."""
    cells = np.arange(k * np.prod(shape)).reshape(k, *shape)
    values, start = (cells % 61).astype(dtype), (cells[0] % 13).astype(dtype)
    grads, params = place(values), copies(k, start)
    assert optim.update_on_host([Item(grads, params, exact_sgd)]) is None
    assert_everywhere(params, (start - values.sum(axis=0, dtype="float64") / 4).astype(dtype))
    for grad, value in zip(grads, values):
        np.testing.assert_array_equal(grad.asnumpy(), value)
    assert [param.context for param in params] == [device(i) for i in range(k)]
    assert all(np.dtype(param.dtype) == dtype and param.shape == shape for param in params)


@pytest.mark.parametrize(
    ("dtype", "small", "sum_dtype"), [("float16", 0.2, "float32"), ("float64", 2**-40, "float64")]
)
def test_float16_is_summed_in_float32_and_float64_in_its_own_precision(dtype, small, sum_dtype):
    """1000 and eight small numbers: a sum in the narrower dtype loses each of them."""
    values = np.array([[1000.0], *[[small]] * 8], dtype)
    seen = []

    def update(total, param):
        seen.append((total.dtype, float(total[0])))
        param[:] = 0

    params = copies(9, np.ones(1, dtype))
    optim.update_on_host([Item(place(values), params, update)])
    assert_everywhere(params, [0])
    exact = values.astype("float64").sum()
    assert seen == [(sum_dtype, pytest.approx(exact, rel=2 * float(np.finfo(sum_dtype).eps)))]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_states_exist_once_and_are_changed_in_place(k):
    """Momentum in powers of two, three steps, beside an item that has two states."""

    def momentum(total, param, velocity, *count):
        np.add(velocity / 2, total, out=velocity)
        for steps in count:
            steps += 1
        param -= velocity

    values = [np.arange(k * n).reshape(k, n).astype("float32") for n in (5, 3)]
    states = [[mx.nd.zeros(5)], [mx.nd.zeros(3), mx.nd.zeros(3, dtype="int32")]]
    items = [
        Item(place(v), copies(k, np.zeros(v.shape[1], "float32")), momentum, state)
        for v, state in zip(values, states)
    ]
    for _ in range(3):
        optim.update_on_host(items)
    for (_, params, _, (velocity, *_)), value in zip(items, values):
        total = value.sum(axis=0)
        np.testing.assert_array_equal(velocity.asnumpy(), 1.75 * total)
        assert_everywhere(params, -(1 + 1.5 + 1.75) * total)
    assert states[1][1].asnumpy().tolist() == [3, 3, 3]


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1])
def test_sizes_around_a_block(size):
    values = np.stack([np.arange(size) % 1000, np.arange(size) % 77]).astype("float32")
    grads, params = place(values), copies(2, np.zeros(size, "float32"))
    optim.update_on_host([Item(grads, params, exact_sgd)])
    assert_everywhere(params, -values.sum(axis=0) / 4)


@pytest.mark.parametrize("num_grads", [1, 2])
def test_several_threads_share_large_arrays(monkeypatch, num_grads):
    """Two threads wait for each other in their first blocks: neither could do all of it alone.

    One gradient is the sum over several processes, and two parameters are updated by it.
    """
    size = 1_600_001  # of two devices' parameters and one's gradients: 19 MB
    assert size * 12 >= threads.BYTES_PER_THREAD
    monkeypatch.setattr(optim.threads, "size", lambda ctx: 1)
    both, seen = threading.Barrier(2), set()

    def update(total, param):
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            both.wait(600)
        exact_sgd(total, param)

    values = np.stack([np.arange(size) % 1000, np.arange(size) % 77]).astype("float32")
    grads, params = place(values), copies(2, np.zeros(size, "float32"))
    optim.update_on_host([Item(grads[:num_grads], params, update)])
    assert_everywhere(params, -values[:num_grads].sum(axis=0) / 4)
    assert len(seen) == 2
    assert_everywhere([grads[1]], values[1])


@pytest.mark.parametrize("k", [1, 3])
def test_items_of_any_shape_and_number_of_gradients(k):
    """One of the parameters is empty; devices whose gradients do not count are left out."""
    shapes = [(3,), (2, 4), (0, 2), (1,), (5, 1, 2)]
    with mx.util.np_shape(True):
        items, want = [], []
        for i, shape in enumerate(shapes):
            values = np.arange(k * np.prod(shape)).reshape(k, *shape).astype("float32")[: 1 + i % k]
            params = copies(k, np.full(shape, i, "float32"))
            items.append(Item(place(values), params, exact_sgd))
            want.append(i - values.sum(axis=0) / 4)
        optim.update_on_host(items)
        for each, value in zip(items, want):
            assert_everywhere(each.params, value)


@pytest.mark.parametrize("bytes_inline", [0, threads.BYTES_INLINE], ids=["prioritized", "inline"])
def test_it_does_not_wait_for_gradients_and_keeps_no_list_of_the_callers(monkeypatch, bytes_inline):
    monkeypatch.setattr(threads, "BYTES_INLINE", bytes_inline)
    gate = threading.Event()
    grads, params = place(np.ones((2, 8), "float32")), copies(2, np.zeros(8, "float32"))
    engine.push(lambda: gate.wait(600), device(1), writes=[grads[1]])
    given = Item(list(grads), list(params), exact_sgd)
    optim.update_on_host([given])
    for values in given[:2]:
        values.clear()
    gate.set()  # only now can the update be computed, and update_on_host has returned
    assert_everywhere(params, np.full(8, -0.5))


class Planted(Exception):
    pass


@pytest.mark.parametrize("bytes_inline", [0, threads.BYTES_INLINE], ids=["prioritized", "inline"])
@pytest.mark.parametrize("waiting", range(3))
def test_an_error_is_raised_where_a_parameter_is_waited_for(monkeypatch, bytes_inline, waiting):
    monkeypatch.setattr(threads, "BYTES_INLINE", bytes_inline)

    def fail_in_update(total, param):
        raise Planted("in the update")

    grads, params = place(np.ones((3, 8), "float32")), copies(3, np.zeros(8, "float32"))
    optim.update_on_host([Item(grads, params, fail_in_update)])
    with pytest.raises(mx.MXNetError, match="in the update") as caught:
        params[waiting].wait_to_read()
    assert "Planted" in str(caught.value)
    assert "fail_in_update" in str(caught.value)
    assert_everywhere(params, np.zeros(8))
    optim.update_on_host([Item(grads, params, exact_sgd)])
    assert_everywhere(params, np.full(8, -0.75))  # and the engine goes on
