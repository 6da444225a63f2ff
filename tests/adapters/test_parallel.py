"""make_parallel: the outputs and gradients of one device, each shard computed on its own."""

import traceback

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from gluonpar.adapters.parallel import make_parallel
from gluonpar.plans import partition
from tests.support import waits
from tests.support.contexts import contexts, device
from tests.support.nests import NESTS, leaves


def values(*shape, seed=0):
    return np.random.RandomState(seed).normal(size=shape).astype("float32")


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_fn_gets_each_devices_shard_on_that_device_in_its_scope(world, n, k):
    seen = []

    def fn(x, y):
        seen.append((x.shape, x.context, mx.context.current_context(), world.ones((1,)).context))
        return x + y

    a, b = values(n, 2), values(n, 2, seed=1)
    out = make_parallel(fn, contexts(k), x=a, y=world.array(b))
    sizes = partition.sizes(n, min(n, k))
    assert seen == [((m, 2), c, c, c) for m, c in zip(sizes, contexts(k))]
    assert (out.context, type(out)) == (device(0), type(world.ones((1,))))
    assert out.asnumpy().tobytes() == (a + b).tobytes()


def test_the_callers_scope_is_what_it_was_even_if_it_is_one_of_the_devices():
    ctx, before = [device(3), device(1)], mx.context.current_context()
    with ctx[0]:
        make_parallel(lambda x: x, ctx, x=values(4))
        assert mx.context.current_context() == device(3)
    assert mx.context.current_context() == before


def forward_and_gradients(x, w, dout):
    """tanh(x w) and the gradients of (dout * output).sum(), in float64."""
    x, w = x.astype("float64"), w.astype("float64")
    out = np.tanh(x @ w)
    dz = dout * (1 - out**2)
    return out, dz @ w.T, x.T @ dz


@pytest.mark.parametrize("n", [1, 3, 8, 17])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_gradients_reach_the_batch_and_a_parameter_on_one_device(world, n, k):
    X, W, dout = values(n, 5), values(5, 4, seed=1), values(n, 4, seed=2)
    x, w, head = (world.array(array, ctx=device(0)) for array in (X, W, dout))
    x.attach_grad()
    w.attach_grad()
    with autograd.record():
        out = make_parallel(
            lambda x: world.tanh(world.dot(x, w.as_in_context(x.context))), contexts(k), x=x
        )
    out.backward(head)
    want = forward_and_gradients(X, W, dout)
    for got, expected in zip((out, x.grad, w.grad), want):
        assert got.context == device(0)
        np.testing.assert_allclose(got.asnumpy(), expected, rtol=1e-5, atol=1e-6)


def test_gradients_reach_a_batch_that_is_on_another_device():
    x = mx.nd.array(values(5, 2), ctx=device(6))
    x.attach_grad()
    with autograd.record():
        out = make_parallel(lambda x: x * x, contexts(2), x=x)
    out.backward()
    np.testing.assert_array_equal(x.grad.asnumpy(), 2 * values(5, 2))
    assert x.grad.context == device(6)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_block_on_all_devices_keeps_each_devices_gradient_there(k):
    net = gluon.nn.Dense(1, use_bias=False, in_units=2)
    net.initialize(mx.init.One(), ctx=contexts(k))
    X = values(7, 2)
    with autograd.record():
        loss = make_parallel(lambda x: net(x), contexts(k), x=X).sum()
    loss.backward()
    grads = net.weight.list_grad()
    for grad, part in zip(grads, partition.slices(7, k)):
        np.testing.assert_allclose(grad.asnumpy()[0], X[part].sum(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_nests_of_batches_and_of_outputs_keep_their_shape(nest, k):
    a, b = np.arange(10.0).reshape(5, 2), np.arange(5, dtype="int64")
    arrays, structure = leaves(make_parallel(lambda x: x, contexts(k), x=nest(a, b)))
    want, want_structure = leaves(nest(a, b))
    assert structure == want_structure
    np.testing.assert_equal([array.asnumpy() for array in arrays], want)


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"]
)
@pytest.mark.parametrize("k", [1, 3])
def test_dtypes_are_kept(world, dtype, k):
    batch = (np.arange(5) % 3).astype(dtype)
    out = make_parallel(lambda x: x, contexts(k), x=batch)
    assert np.dtype(out.dtype) == dtype
    np.testing.assert_array_equal(out.asnumpy(), batch)


def test_several_rows_per_sample_are_in_the_order_of_the_samples():
    batch = np.arange(12.0).reshape(3, 4)
    out = make_parallel(lambda x: x.reshape((-1,)), contexts(2), x=batch)
    np.testing.assert_array_equal(out.asnumpy(), batch.ravel())


@pytest.mark.parametrize("k", [1, 2])
def test_the_output_is_a_new_array(k):
    batch = mx.nd.array(values(4))
    make_parallel(lambda x: x, contexts(k), x=batch)[:] = -1
    np.testing.assert_array_equal(batch.asnumpy(), values(4))


def test_nothing_waits():
    x = mx.nd.array(values(6, 2))
    x.attach_grad()
    with waits.refused(), autograd.record():
        make_parallel(lambda x, y: x * y, contexts(3), x=x, y=values(6, 2)).sum().backward()
    np.testing.assert_array_equal(x.grad.asnumpy(), values(6, 2))


def test_an_exception_in_fn_names_the_device_and_keeps_its_traceback():
    def fn(x):
        if x.context == device(1):
            raise KeyError("no such layer")
        return x

    before = mx.context.current_context()
    with pytest.raises(
        RuntimeError, match=r"shard 1 of 3 failed on [cg]pu\(1\): KeyError.*layer"
    ) as e:
        make_parallel(fn, contexts(3), x=values(5))
    assert type(e.value.__cause__) is KeyError
    assert traceback.extract_tb(e.value.__cause__.__traceback__)[-1].name == "fn"
    assert mx.context.current_context() == before


def on_second(other):
    """A function that returns its input on the first device, and ``other(input)`` on the second."""
    return lambda x: other(x) if x.context == device(1) else x


@pytest.mark.parametrize(
    ("fn", "error", "words"),
    [
        (lambda x: x.mean(), ValueError, r"output of shape \(1,\) on .* for 3 samples"),
        (lambda x: [x, {"m": x.mean()}], ValueError, r"output\[1\]\['m'\] of shape \(1,\)"),
        (lambda x: (x,) * (1 + x.context.device_id), ValueError, r"differs on [cg]pu\(1\)"),
        (on_second(lambda x: [x]), TypeError, r"output a list on [cg]pu\(1\)"),
        (on_second(lambda x: x[:, :1]), mx.MXNetError, r"shape: expected \[-1,2\], got \[2,1\]"),
        (on_second(lambda x: x.astype("int32")), mx.MXNetError, "int32.* float32"),
        (lambda x: 1.5, TypeError, r"output a float on [cg]pu\(0\)"),
        (lambda x: None, TypeError, r"output a NoneType on [cg]pu\(0\)"),
        (lambda x: x.asnumpy(), TypeError, r"output a ndarray on [cg]pu\(0\)"),
        (lambda x: x.tostype("csr"), TypeError, r"output a csr on [cg]pu\(0\)"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(fn, error, words):
    with pytest.raises(error, match=words):
        make_parallel(fn, contexts(2), x=values(5, 2))


def test_a_number_without_axes_is_refused():
    with mx.util.np_shape(True), mx.util.np_array(True):
        with pytest.raises(ValueError, match=r"shape \(\) on [cg]pu\(0\) for 1 samples"):
            make_parallel(lambda x: x.mean(), contexts(2), x=values(2))


@pytest.mark.parametrize(
    ("fn", "batch", "error", "words"),
    [
        (abs, {}, ValueError, "must contain an array"),
        (abs, {"x": values(0, 2)}, ValueError, "at least 1 sample, got 0"),
        (abs, {"x": values(3), "y": values(4)}, ValueError, r"\['x'\].*\(3,\).*\['y'\].*\(4,"),
        (abs, {"x": "text"}, TypeError, r"batch\['x'\] .*str"),
    ],
)
def test_bad_arguments_are_refused(fn, batch, error, words):
    with pytest.raises(error, match=words):
        make_parallel(fn, contexts(2), **batch)
