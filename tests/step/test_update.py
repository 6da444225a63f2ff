"""The step's all-reduce and update: every way of doing them gives the same parameters."""

import threading

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gluonpar import cluster, optim, replicas, step
from gluonpar.collectives import host
from gluonpar.collectives.exchange import Exchange
from gluonpar.replicas import get_params
from gluonpar.runtime import threads
from tests.support.contexts import algorithms, device

LR, BATCH_SIZE = 0.3, 7
# The pass over the host's memory leaves each device its own gradients.
ONE_PASS = (None, "host") if device().device_type == "cpu" else ()
of_one_pass = pytest.mark.cpu("the one-pass update is for CPU contexts")


def allreduce_sgd(device_params, lr, batch_size, algorithm=None):
    """The last two lines of train_batch."""
    exchange = Exchange([params[0].context for params in device_params], algorithm)
    buckets = replicas.buckets(replicas.trained(device_params))
    step.allreduce_sgd(exchange, buckets, lr, cluster.PendingGather(batch_size, "samples"))


def plain_list(params, ctx):
    return [*get_params(params, ctx)]


def place(makes, weights, grads, array=mx.nd.array):
    """Each device's parameters, made by ``makes[i](params, ctx)``, with the gradients given."""
    params = [array(weight, dtype=weight.dtype) for weight in weights]
    device_params = [make(params, device(i)) for i, make in enumerate(makes)]
    for copies, of_device in zip(device_params, grads):
        for copy, grad in zip(copies, of_device):
            array(grad, dtype=grad.dtype, ctx=copy.context).copyto(copy.grad)
    return device_params


def assert_near(got, want, scale):
    """To a few roundings of numbers of the size of ``scale``."""
    tolerance = 4e-3 if got.dtype == np.float16 else 1e-6
    assert (np.abs(got.astype("float64") - want) <= tolerance * scale).all()


@pytest.mark.parametrize("algorithm", [None, *algorithms()])
@settings(max_examples=25)
@given(
    makes=st.lists(st.sampled_from([get_params, plain_list]), min_size=1, max_size=5),
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5),
    dtypes=st.permutations(["float16", "float16", "float32", "float32", "float64"]),
    bucket_bytes=st.sampled_from([1, 60, replicas.BUCKET_BYTES]),
    array=st.sampled_from([mx.nd.array, mx.np.array]),
)
def test_the_update_is_the_oracles_on_every_device(
    algorithm, makes, shapes, dtypes, bucket_bytes, array
):
    """To rounding, and to the same bits; one pass leaves the gradients, others leave the sums."""
    rng = np.random.RandomState(0)
    kinds = [*zip(shapes, dtypes)]
    weights, *grads = ([rng.normal(size=s).astype(t) for s, t in kinds] for _ in (0, *makes))
    with mx.util.np_shape(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "BUCKET_BYTES", bucket_bytes)
        device_params = place(makes, weights, grads, array)
        allreduce_sgd(device_params, LR, BATCH_SIZE, algorithm)
        for i, weight in enumerate(weights):
            own = [of_device[i].astype("float64") for of_device in grads]
            copies = [params[i] for params in device_params]
            first, *others = (copy.asnumpy() for copy in copies)
            assert (type(copies[-1]), first.dtype) == (type(array([1])), weight.dtype)
            size = sum(np.abs(grad) for grad in own)
            scale = np.abs(weight.astype("float64")) + LR / BATCH_SIZE * size
            assert_near(first, weight - LR / BATCH_SIZE * sum(own), scale)
            for other in others:
                np.testing.assert_array_equal(other, first)
            for copy, grad in zip(copies, own):
                left = copy.grad.asnumpy()
                if algorithm in ONE_PASS:
                    np.testing.assert_array_equal(left, grad)
                else:
                    assert_near(left, sum(own), size)


@of_one_pass
@pytest.mark.parametrize(("dtype", "small"), [("float16", 0.2), ("float64", 2**-40)])
def test_float16_is_summed_in_float32_and_float64_in_its_own_precision(dtype, small):
    """1000 and eight small numbers: a sum in the narrower dtype loses each of them."""
    grads = np.array([[1000.0], *[[small]] * 8], dtype)
    device_params = place([get_params] * 9, [np.zeros(1, dtype)], grads[:, None])
    allreduce_sgd(device_params, 1.0, 1)
    assert device_params[8][0].asscalar() == -grads.sum(dtype="float64").astype(dtype) < -1000


@of_one_pass
def test_several_threads_share_large_arrays(monkeypatch):
    """Two threads wait for each other in their first blocks: neither could do all of it alone."""
    size = 1_600_001  # of two devices' parameters and gradients: 26 MB
    both, seen, rule = threading.Barrier(2), set(), optim.rule

    def meeting(*args):
        update = rule(*args)

        def run(total, param):
            if threading.get_ident() not in seen:
                seen.add(threading.get_ident())
                both.wait(600)
            update(total, param)

        return run

    monkeypatch.setattr(optim, "rule", meeting)
    monkeypatch.setattr(host.threads, "size", lambda ctx: 1)
    grads = np.stack([np.arange(size) % 1000, np.arange(size) % 77]).astype("float32")
    device_params = place([get_params] * 2, [np.zeros(size, "float32")], grads[:, None])
    allreduce_sgd(device_params, 0.25, 1)
    for params in device_params:
        np.testing.assert_array_equal(params[0].asnumpy(), -grads.sum(axis=0) / 4)
    assert len(seen) == 2


class Planted(Exception):
    pass


@of_one_pass
@pytest.mark.parametrize("bytes_inline", [0, threads.BYTES_INLINE], ids=["prioritized", "inline"])
@pytest.mark.parametrize("waiting", range(3))
def test_an_error_is_raised_where_a_parameter_is_waited_for(monkeypatch, bytes_inline, waiting):
    monkeypatch.setattr(threads, "BYTES_INLINE", bytes_inline)

    def fail_in_update(total, param):
        raise Planted("in the update")

    grads, params = ([mx.nd.full((8,), x, ctx=device(i)) for i in range(3)] for x in (1, 0))
    host.update([host.Update(grads, params, fail_in_update)])
    with pytest.raises(mx.MXNetError, match=r"(?s)fail_in_update.*Planted.*in the update"):
        params[waiting].wait_to_read()
    assert [param.asnumpy().any() for param in params] == [False] * 3
    host.update([host.Update(grads, params, optim.rule(1.0, 0.25))])  # and the engine goes on
    assert [param.asnumpy().tolist() for param in params] == [[-0.75] * 8] * 3
