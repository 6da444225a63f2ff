"""replicas: every device has its own parameters and gradients."""

import ctypes
import gc
import re

import mxnet as mx
import numpy as np
import pytest
from contexts import device
from hypothesis import given, settings
from hypothesis import strategies as st
from mxnet import autograd

import gluonpar
from gluonpar import replicas, step
from gluonpar.collectives.exchange import Exchange
from gluonpar.replicas import get_params
from gluonpar.runtime import memory


def values():
    return [np.arange(6, dtype="float32").reshape(2, 3), np.arange(10, 14, dtype="float32")]


def originals(ctx=None):
    return [mx.nd.array(value, ctx=ctx) for value in values()]


def assert_equal(arrays, expected):
    for array, value in zip(arrays, expected):
        np.testing.assert_array_equal(array.asnumpy(), value)


@pytest.mark.parametrize("change", [lambda params: params[:1], lambda params: params[::-1]])
def test_replicas_of_other_shapes_are_refused(change):
    ctx = [device(0), device(1)]
    first, second = (get_params(originals(), c) for c in ctx)
    words = r"on [cg]pu\(1\) have shapes \[.*\], on [cg]pu\(0\) \[\(2, 3\), \(4,\)\]"
    with pytest.raises(ValueError, match=words):
        gluonpar.train_batch(np.ones((2, 3)), np.ones(2), [first, change(second)], ctx, 0.1)


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
        whole, replicas.BUCKET_BYTES = replicas.BUCKET_BYTES, bucket_bytes
        try:
            buckets = [bucket.copies for bucket in replicas.buckets(device_params)]
        finally:
            replicas.BUCKET_BYTES = whole
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


def mlp(x, params):
    """Two dense layers; whatever parameters there are beyond four are added to the scores."""
    W1, b1, W2, b2, *more = params
    # Not FullyConnected: MXNet's gives a bias no gradient where the weight takes none.
    h = mx.nd.tanh(mx.nd.dot(x, W1.T) + b1.reshape((1, -1)))
    scores = mx.nd.dot(h, W2.T) + b2.reshape((1, -1))
    for extra in more:
        scores = mx.nd.broadcast_add(scores, extra)
    return scores


MLP_SHAPES = [(5, 4), (5,), (3, 5), (3,), (1, 3)]


def mlp_params(ctx):
    rng = np.random.RandomState(0)
    return [mx.nd.array(rng.normal(size=shape), ctx=ctx) for shape in MLP_SHAPES]


def plain_list(ctx):
    params = mlp_params(ctx)
    for param in params:
        param.attach_grad()
    return params


def train(device_params, num_steps=4, n=7, algorithm=None):
    """The parameters of all devices, as NumPy, after some steps."""
    rng = np.random.RandomState(1)
    ctx = [params[0].context for params in device_params]
    for _ in range(num_steps):
        X, y = rng.normal(size=(n, 4)).astype("float32"), rng.randint(0, 3, size=n)
        for param in (param for params in device_params for param in params):
            if param.grad is not None:
                param.grad[:] = 0  # for those that add to their gradients
        gluonpar.train_batch(X, y, device_params, ctx, 0.5, model=mlp, algorithm=algorithm)
    return [[param.asnumpy() for param in params] for params in device_params]


def replace_an_entry(params):
    params[1] = params[1].copy()
    params[1].attach_grad()


def replace_an_entry_but_not_its_gradient(params):
    new = params[1].copy()
    autograd.mark_variables([new], [params[1].grad])
    params[1] = new


def freeze_by_replacing(params):
    params[0] = params[0].copy()  # no gradient attached


def attach_an_adding_gradient(params):
    params[2].attach_grad(grad_req="add")


def append(params):
    params.append(mx.nd.ones((1, 3), ctx=params[0].context))
    params[-1].attach_grad()


def replace_one_and_delete_one(params):
    append(params)
    del params[4]


CHANGES = [
    replace_an_entry,
    replace_an_entry_but_not_its_gradient,
    freeze_by_replacing,
    attach_an_adding_gradient,
    append,
    replace_one_and_delete_one,
]


def assert_same_bits(got, want):
    assert [len(params) for params in got] == [len(params) for params in want]
    for mine, theirs in zip(got, want):
        for a, b in zip(mine, theirs):
            np.testing.assert_array_equal(a, b)


def moved(device_params):
    """Whether training changed each parameter, on every device alike."""
    start = [param.asnumpy() for param in mlp_params(device(0))]
    return [[(p != s).any() for p, s in zip(params, start)] for params in device_params]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 4 << 20])
@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_replicas_train_as_plain_lists_bit_for_bit(monkeypatch, bucket_bytes, algorithm):
    """With two devices every order of adding is the same, so algorithms cannot differ either."""
    monkeypatch.setattr(replicas, "BUCKET_BYTES", bucket_bytes)
    ctx = [device(i) for i in range(2)]
    got = train([get_params(mlp_params(c), c) for c in ctx], algorithm=algorithm)
    assert_same_bits(got, train([plain_list(c) for c in ctx], algorithm=algorithm))
    assert moved(got) == [[True] * 5] * 2


@pytest.mark.parametrize("which", [[0], [1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_replica_trains_as_plain_lists(change, which):
    ctx = [device(i) for i in range(3)]
    mine, plain = [get_params(mlp_params(c), c) for c in ctx], [plain_list(c) for c in ctx]
    same_shapes = change not in (append, freeze_by_replacing)
    changed = which if same_shapes else [0, 1, 2]
    train(mine, 1), train(plain, 1)  # so that what is remembered of the arrays is out of date
    for params in (mine, plain):
        for i in changed:
            change(params[i])
    got = train(mine)
    assert_same_bits(got, train(plain))
    assert moved(got) == [[True] * min(5, len(mine[0]))] * 3


@pytest.mark.parametrize("frozen", [(), (1,), (0, 4), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("algorithm", [None, "star"])
def test_frozen_parameters_stay_and_the_others_train(frozen, algorithm):
    ctx = [device(i) for i in range(2)]
    device_params = [get_params(mlp_params(c), c, frozen) for c in ctx]
    if len(frozen) == 5:  # nothing to differentiate: the update alone
        step.allreduce_sgd(Exchange(ctx, algorithm), replicas.buckets(device_params), 0.5, 1)
        got = [[param.asnumpy() for param in params] for params in device_params]
    else:
        got = train(device_params, algorithm=algorithm)
    assert moved(got) == [[i not in frozen for i in range(5)]] * 2
    assert_same_bits(got[:1], got[1:])


@pytest.mark.parametrize("which", [[0], [2], [0, 1]], ids=str)
@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_a_parameter_frozen_on_some_devices_only_is_refused_by_number(which, algorithm):
    device_params = [get_params(mlp_params(c), c) for c in (device(i) for i in range(3))]
    for i in which:
        freeze_by_replacing(device_params[i])
    with pytest.raises(ValueError, match="parameter 0 has a gradient on some devices only; freeze"):
        train(device_params, algorithm=algorithm)
    for params in device_params:
        assert_equal(params, [param.asnumpy() for param in mlp_params(device(0))])
