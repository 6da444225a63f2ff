"""replicas: every device has its own parameters and gradients."""

import ctypes
import gc
import re

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mxnet import autograd

import gluonpar
from gluonpar import replicas
from gluonpar.replicas import get_params
from gluonpar.runtime import memory
from tests.support.contexts import contexts, device


def values():
    return [np.arange(6, dtype="float32").reshape(2, 3), np.arange(10, 14, dtype="float32")]


def originals(ctx=None):
    return [mx.nd.array(value, ctx=ctx) for value in values()]


def assert_equal(arrays, expected):
    for array, value in zip(arrays, expected):
        np.testing.assert_array_equal(array.asnumpy(), value)


@pytest.mark.parametrize("ctx", [1, "cpu(0)", [device(0), device(1)]])
def test_copies_are_on_a_context(ctx):
    with pytest.raises(
        TypeError, match=re.escape(f"ctx must be an mx.Context, such as mx.cpu(0), got {ctx!r}")
    ):
        get_params(originals(), ctx)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3),
            st.sampled_from(["float16", "float32", "float64"]),
            st.booleans(),  # frozen
        ),
        max_size=8,
    ),
    bucket_bytes=st.integers(1, 100),
)
def test_every_trained_parameter_is_in_one_bucket_and_the_last_come_first(kinds, bucket_bytes):
    with mx.util.np_shape(True):
        params = [mx.nd.ones(tuple(shape), dtype=dtype) for shape, dtype, _ in kinds]
        frozen = [i for i, (*_, is_frozen) in enumerate(kinds) if is_frozen]
        device_params = [get_params(params, device(i), frozen) for i in range(2)]
        buckets = replicas.neighbours(replicas.trained(device_params), bucket_bytes)
        trained = [i for i in range(len(params)) if i not in frozen and params[i].size]
        assert [each.index for bucket in buckets for each in bucket] == trained[::-1]
        for bucket in buckets:
            assert len({each.params[0].dtype for each in bucket}) == 1
            size = sum(memory.num_bytes(each.grads[0]) for each in bucket)
            assert size <= bucket_bytes or len(bucket) == 1
            for i, params, grads, fresh in bucket:
                assert all(a is copies[i] for a, copies in zip(params, device_params))
                assert [memory.chunk(grad) for grad in grads] == [
                    memory.chunk(copies[i].grad) for copies in device_params
                ]
                assert not fresh
        for before, after in zip(buckets, buckets[1:]):  # no bucket could hold the next one's first
            size = sum(memory.num_bytes(each.grads[0]) for each in [*before, after[0]])
            same_dtype = before[0].params[0].dtype == after[0].params[0].dtype
            assert size > bucket_bytes or not same_dtype


@pytest.mark.parametrize("ctx", [device(0), device(3)], ids=str)
@pytest.mark.parametrize("frozen", [(), (0, 1)])
def test_copies_of_views_and_of_replicas_are_copies(ctx, frozen):
    whole = mx.nd.arange(10)
    first = get_params([whole[2:5], whole[5:9]], ctx, frozen)
    second = get_params(first, ctx, frozen)
    first[0][:] = -1
    assert_equal(second, [[2, 3, 4], [5, 6, 7, 8]])
    assert {array.context for array in [*first, *second]} == {ctx}
    assert whole.asnumpy().tolist() == list(range(10))
    assert len(chunks([whole, *first, *second])) == 5


def test_a_recorded_loss_of_copies_has_no_gradient_with_respect_to_the_originals():
    params = originals()
    for param in params:
        param.attach_grad()
    with autograd.record():
        trained, frozen = get_params(params, device(0), frozen=[1])
        loss = trained.sum() + frozen.sum()
    loss.backward()
    assert_equal([param.grad for param in params], [np.zeros((2, 3)), np.zeros(4)])
    assert_equal([trained.grad], [np.ones((2, 3))])


def chunks(arrays):
    return {memory.chunk(array) for array in arrays}


def allocated(chunk):
    """Bytes: the chunk begins with its Storage::Handle, whose second member they are."""
    return ctypes.c_size_t.from_address(chunk + ctypes.sizeof(ctypes.c_void_p)).value


@pytest.mark.parametrize("bucket_bytes", [1, 4000, 4 << 20])
def test_k_devices_hold_parameters_and_gradients_and_nothing_more(monkeypatch, bucket_bytes):
    monkeypatch.setattr(replicas, "BUCKET_BYTES", bucket_bytes)
    k, params = 3, [mx.nd.ones(shape) for shape in gluonpar.models.lenet.LENET_SHAPES]

    def living():
        mx.nd.waitall()
        gc.collect()
        return chunks(array for array in gc.get_objects() if isinstance(array, mx.nd.NDArray))

    before = living()
    device_params = [get_params(params, device(i)) for i in range(k)]
    mine = chunks(array for params in device_params for p in params for array in (p, p.grad))
    assert living() - before <= mine
    assert sum(map(allocated, mine)) == 2 * k * sum(map(memory.num_bytes, params))


def attached(param, **how):
    param.attach_grad(**how)
    return param


CHANGES = {  # of the second of three devices, and what the error says
    "a shape": (
        lambda params: params[::-1],
        r"0 must have one shape, got \(4,\) on .*\(1\), \(2, 3\)",
    ),
    "a parameter less": (lambda params: params[:1], r"equally many .* got \[2, 1, 2\]"),
    "a context": (lambda params: [params[0], originals(device(0))[1]], r"parameter 1 must be on"),
    "frozen": (
        lambda params: [params[0], params[1].copy()],
        "1 has a gradient on some devices only",
    ),
    "rows": (
        lambda params: [params[0], attached(params[1], stype="row_sparse")],
        r"gradients\[1\] .* row_sparse",
    ),
    "a dtype": (
        lambda params: [params[0], attached(params[1].astype("float64"))],
        r"\[1\] on [cg]pu\(1\) .*float64",
    ),
}


@pytest.mark.parametrize("changed", CHANGES)
@pytest.mark.parametrize("algorithm", ["by hand", None, "ring"])
def test_parameters_that_are_no_copies_of_each_other_are_refused(changed, algorithm):
    ctx, (change, words) = contexts(3), CHANGES[changed]
    device_params = [get_params(originals(), c) for c in ctx]
    with autograd.record():
        losses = [sum(param.sum() for param in params) for params in device_params]
    autograd.backward(losses)
    device_params[1] = change(device_params[1])
    with pytest.raises(ValueError, match=words):
        if algorithm == "by hand":
            gluonpar.allreduce_grads(device_params)
        else:

            def model(X, params):
                return X * sum(param.sum() for param in params)

            batch = np.ones(3, "float32"), np.zeros(3, "float32")
            gluonpar.train_batch(*batch, device_params, ctx, 0.1, model, lambda p, y: p, algorithm)
    assert_equal(device_params[0], values())
    assert_equal([param.grad for param in device_params[0]], [np.ones((2, 3)), np.ones(4)])
    if algorithm == "by hand":
        assert all(param._fresh_grad for param in device_params[0])


def test_gradients_of_no_device_are_refused():
    with pytest.raises(ValueError, match="at least one parameter"):
        gluonpar.allreduce_grads([])


@pytest.mark.cpu("the simulator has no kernel for gradients of embeddings")
def test_row_sparse_and_frozen_gradients_are_summed_and_left():
    device_params = [[mx.nd.zeros((3, 1), ctx=device(i)), mx.nd.ones((1,))] for i in range(2)]
    device_params = [[table, one.as_in_context(table.context)] for table, one in device_params]
    for table, _ in device_params:
        table.attach_grad(stype="row_sparse")
    for rows in ([[0], [1]], [[2]]):
        with autograd.record():
            losses = [
                mx.nd.Embedding(mx.nd.array(row, table.context), table, 3, 1, sparse_grad=True)
                * one
                for row, (table, one) in zip(rows, device_params)
            ]
        autograd.backward(losses)
        gluonpar.allreduce_grads(device_params)
        want = np.zeros((3, 1))
        want[sum(rows, [])] = 1
        assert_equal([table.grad for table, _ in device_params], [want, want])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_copies_with_the_same_bits_are_identical_and_one_bit_more_is_not(dtype):
    """NaN is itself; zero is not minus zero."""
    value = np.array([1.5, np.nan, 0.0], dtype)
    copies = [mx.nd.array(value, ctx=device(i), dtype=dtype) for i in range(3)]
    replicas.check_identical(copies, "w")
    for place, other in ((0, 1.75), (2, -0.0)):
        changed = value.copy()
        changed[place] = other
        copies[2][:] = mx.nd.array(changed, dtype=dtype)
        with pytest.raises(replicas.ReplicasDifferError, match=r"w differs .*\(2\), by up to"):
            replicas.check_identical(copies, "w")
