"""How gluonpar.Trainer sums gradients, and what may be done between the sum and the update."""

import threading

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from gluonpar import collectives, metrics
from gluonpar.gluon.trainer import Trainer
from gluonpar.runtime import engine, threads
from tests.support import gluon_runs as runs
from tests.support.contexts import algorithms, device
from tests.support.gluon_runs import assert_as_one, contexts, give_grads, weights


@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("algorithm", algorithms())
def test_every_algorithm_can_be_chosen(algorithm, optimizer, compression, small_buckets):
    options = {"learning_rate": 0.05}
    more = {"algorithm": algorithm, "compression": compression}
    net, _ = runs.run(3, optimizer, options, **more)
    # float16 rounds a gradient by 2**-11 of it; Adam divides by its size, so that stays as it is
    assert_as_one(net, runs.stock(optimizer, options), 1e-3 if compression else 1e-5)


@pytest.fixture
def messages():
    """What the executor named "recorded" has been given: arrays on the first device, and the op."""
    seen = []

    @collectives.register_executor("recorded")
    def recorded(lists, op):
        seen.append(([data[0].copy() for data in lists], op))
        for data in lists:
            collectives.allreduce(data, "star", op)

    yield seen
    del collectives.ALGORITHMS["recorded"]


def test_the_algorithm_named_is_the_one_used(messages):
    for algorithm, compression in (("recorded", None), ("recorded", "fp16"), (None, None)):
        params = weights([[1.0]], 2)
        trainer = Trainer(params, "sgd", algorithm=algorithm, compression=compression)
        give_grads(params, [[1.0, 2.0]])
        trainer.step(1)
        left = [grad.asscalar() for grad in params[0].list_grad()]
        if algorithm is not None:
            assert left[0] == 3.0
        elif device().device_type == "cpu":
            assert left == [1.0, 2.0]  # in one pass they stay
    assert [(array.dtype, op) for [array], op in messages] == [(np.float32, "sum")] * 2


@pytest.mark.parametrize("size", [3, 5])
def test_buckets_hold_neighbouring_layers_the_last_first(messages, size):
    """gluon.Trainer sorts parameters by name, in which a tenth layer comes before the second."""
    net = gluon.nn.HybridSequential()
    net.add(*[gluon.nn.Dense(2, in_units=2, use_bias=False) for _ in range(12)])
    net.initialize(ctx=contexts(2))
    how = {"algorithm": "recorded", "bucket_bytes": size * 16 + 7}
    trainer = Trainer(net.collect_params(), "sgd", **how)
    give_grads([layer.weight for layer in net], [[i, 0] for i in range(12)])
    trainer.step(1)
    layers = [[array[0, 0].asscalar() for array in arrays] for arrays, _ in messages]
    numbers = [*range(11, -1, -1)]
    assert layers == [numbers[i : i + size] for i in range(0, 12, size)]


# In float16 2049 is 2048 and 1 + 2**-12 is 1: gradients are rounded, added in float32, and rounded.
ROUNDED = [
    *([1, 2, 4, 7], [2048, 1, 1, 2050], [2048, 1, 0, 2048], [0.5, 0.25, 0.125, 0.875]),
    *([1 + 2**-12, 1, 0, 2], [1 + 2**-12, -1, 0, 0]),
]


@pytest.mark.parametrize("way", ["sgd", "test", "allreduce_grads"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compression_rounds_every_gradient_and_the_sum_to_float16(dtype, way):
    *grads, sums = np.array(ROUNDED).T
    params = weights([[0.0] * len(sums)], 3, dtype=dtype)
    optimizer = "sgd" if way == "allreduce_grads" else way
    trainer = Trainer(params, optimizer, {"learning_rate": 1.0}, compression="fp16")
    give_grads(params, [grads])
    if way == "allreduce_grads":
        trainer.allreduce_grads()
        found = params[0].list_grad()
    else:
        trainer.step(1)
        found = params[0].list_data()
    sign = -1 if way == "sgd" else 1
    assert [array.asnumpy().tolist() for array in found] == [(sign * sums).tolist()] * 3


@pytest.mark.parametrize("num_params", [1, 2])  # in one bucket, which is summed on one device
@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("algorithm", ["star", "ring", "tree"])
def test_a_step_leaves_the_other_devices_their_own_gradients(algorithm, compression, num_params):
    grads = [
        [[i + 2.0**-12 * (j + k) for j in range(5)] for k in range(4)] for i in range(num_params)
    ]
    params = weights([[1.0] * 5] * num_params, 4)
    trainer = Trainer(params, "sgd", algorithm=algorithm, compression=compression)
    give_grads(params, grads)
    trainer.step(1)
    for param, given in zip(params, grads):
        left = [grad.asnumpy().tolist() for grad in param.list_grad()]
        assert sum(one != other for one, other in zip(left, given)) == 1, left


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_a_parameter_without_dimensions_is_trained_outside_np_shape(compression):
    ctx = contexts(2)
    with mx.util.np_shape(True):
        scale = gluon.Parameter("scale", shape=())
        scale.initialize(mx.init.Zero(), ctx=ctx)
        with autograd.record():
            losses = [scale.data(c) * 2 for c in ctx]
        autograd.backward(losses)
    Trainer([scale], "sgd", {"learning_rate": 1.0}, compression=compression).step(1)
    assert [value.asnumpy() for value in scale.list_data()] == [-4, -4]


def test_clip_global_norm_counts_every_dtype_and_pinned_parameters():
    """3-4-12: the norm of the sums is 13."""
    params = [
        weights([[1.0, 1.0]], 2, dtype=dtype)[0] for dtype in ("float32", "float16", "float64")
    ]
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    give_grads(params, [[[1.0, 0.0], [2.0, 0.0]], [[2.0, 0], [2.0, 0]], [[0, 6.0], [0, 6.0]]])
    trainer.allreduce_grads()
    assert trainer.clip_global_norm(6.5).asscalar() == 13
    halves = [param.list_grad()[1].asnumpy() for param in params]
    np.testing.assert_allclose(halves, [[1.5, 0], [2, 0], [0, 6]], rtol=1e-3)


def test_clip_global_norm_of_no_gradient_is_zero():
    params = weights([[1.0]], 2)
    trainer = Trainer(params, "sgd")
    norm = trainer.clip_global_norm(1.0)  # there was no backward
    assert (norm.asscalar(), norm.context) == (0, device())
    give_grads(params, [[0.0, 0.0]])
    trainer.allreduce_grads()
    assert trainer.clip_global_norm(1.0).asscalar() == 0
    trainer.update(1)
    assert params[0].list_data()[0].asscalar() == 1


@pytest.mark.parametrize("max_norm", [1e-3, 1.0])
@pytest.mark.parametrize(
    ("dtype", "value", "size"),
    [
        ("float16", 300, 1000),  # squares overflow float16
        ("float16", 1e-4, 1000),  # they vanish in it
        ("float32", 1, 20_000_000),  # more than 2**24 ones: added one by one, they end there
        ("float32", 1e25, 100),
        ("float32", 3e38, 100),  # the norm itself overflows float32
        ("float32", 1e-30, 100),
        ("float64", 1e200, 100),
        ("float64", 1e-200, 100),
    ],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_the_norm_of_finite_gradients_is_right_however_large_small_or_many(
    dtype, value, size, max_norm, sparse
):
    size = min(size, 1000) if sparse else size
    shape, stype = (size // 4, 4), "row_sparse" if sparse else "default"
    param = gluon.Parameter("w", shape=shape, dtype=dtype, grad_stype=stype)
    param.initialize(ctx=device())
    trainer = Trainer([param], "sgd")
    values, grad = np.full(shape, value, dtype), param.grad(device())
    param.data(device())._fresh_grad = True
    if sparse:
        rows = (values, np.arange(len(values)))
        mx.nd.sparse.row_sparse_array(rows, shape, device(), dtype).copyto(grad)
    else:
        grad[:] = mx.nd.array(values, dtype=dtype)
    norm = np.sqrt(np.longdouble(size)) * values.flat[0]
    found = trainer.clip_global_norm(max_norm)
    assert (found.shape, found.dtype, found.context) == ((1,), np.float32, device())
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(found.asscalar(), np.float32(norm), rtol=1e-5)
    clipped = (grad.data if sparse else grad).asnumpy()
    want = values.flat[0] * min(max_norm / norm, 1)  # rounded once: exactly so, or to a neighbour
    np.testing.assert_allclose(clipped[[0, -1]], np.full((2, 4), want, dtype), rtol=1e-5)


@pytest.mark.parametrize("device", [1, 2])
@pytest.mark.parametrize("number", range(6))
def test_check_replicas_finds_one_bit(device, number):
    net, trainer = runs.run(3)
    trainer.check_replicas()
    param = list(net.collect_params().values())[number]
    copy = param.list_data()[device]
    changed = copy.asnumpy()
    changed.reshape(-1).view("uint32")[-1] ^= 1
    copy[:] = mx.nd.array(changed)
    with pytest.raises(
        metrics.ReplicasDiffer, match=rf"{param.name} .*[cg]pu\(0\).*[cg]pu\({device}\)"
    ):
        trainer.check_replicas()


WAYS = ["step", "prioritized", "adam", "no_sync", "allreduce_grads", "ring", "stale"]


@pytest.mark.parametrize("do", WAYS)
def test_it_does_not_wait_for_the_gradients(do, monkeypatch):
    """A gradient is held back until the trainer has returned: what waits would not return.

    Meanwhile a Parameter's own lists may get other arrays.
    """
    params = weights([[1.0, 2.0], [4.0]], 2)
    optimizer = "adam" if do == "adam" else "sgd"
    algorithm = "ring" if do == "ring" else None
    if do == "prioritized":
        monkeypatch.setattr(threads, "BYTES_INLINE", 0)
    trainer = Trainer(params, optimizer, {"learning_rate": 1.0}, algorithm=algorithm)
    give_grads(params, [[1.0, 2.0], [3.0, 5.0]])
    gate, passed = threading.Event(), []
    last = params[1].list_grad()[1]
    engine.push(lambda: passed.append(gate.wait(600)), device(1), writes=[last])
    last += 1
    if do == "no_sync":
        with trainer.no_sync():
            give_grads(params, [[1.0, 2.0], [3.0, 6.0]])
        trainer.step(1)
    elif do == "allreduce_grads":
        trainer.allreduce_grads()
        norm = trainer.clip_global_norm(1e6)
        trainer.update(1)
    elif do == "stale":
        params[0].list_data()[0]._fresh_grad = False
        trainer.step(1, ignore_stale_grad=True)
    else:
        trainer.step(1)
    assert passed == []
    copies = [param.list_data()[1] for param in params]
    for arrays in (*(param.list_data() for param in params), *(p.list_grad() for p in params)):
        arrays.clear()
    gate.set()
    found = [copy.asnumpy().tolist() for copy in copies]
    first = 2 if do == "stale" else 3
    want = [[1 - first, 2 - first], [-5]]
    if do == "adam":
        np.testing.assert_allclose(found[0] + found[1], [0, 1, 3], atol=1e-5)
    else:
        assert found == want
    if do == "allreduce_grads":
        assert norm.asscalar() == pytest.approx(np.sqrt(9 + 9 + 81), rel=1e-6)
    assert passed == [True]
