"""gluonpar.Trainer in other precisions than float32, and in several at once."""

import functools

import gluon_runs as runs
import mxnet as mx
import numpy as np
import pytest
from gluon_runs import assert_as_one, give_grads, weights
from mxnet import gluon

from gluonpar.gluon.trainer import Trainer


@pytest.mark.parametrize("optimizer", ["sgd", "nag"])
def test_float64_is_trained_in_float64(optimizer, small_buckets):
    options = {"learning_rate": 0.05, "momentum": 0.9}
    make, data = functools.partial(runs.mlp, dtype="float64"), runs.batches(dtype="float64")
    net, _ = runs.run(3, optimizer, options, make, data)
    assert_as_one(net, runs.stock(optimizer, options, make, data), 1e-12)
    assert {value.dtype for value in runs.values(net)} == {np.dtype("float64")}


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "nag"])
def test_float16_with_multi_precision_is_updated_in_float32(optimizer, options):
    """To the bit: sums of small integers are exact in float16 (MXNet has no float16 networks here).

    The steps are so small that without a float32 copy most of them would be lost.
    """
    options = {} if optimizer == "adam" else options
    options = {"learning_rate": 1e-4, "multi_precision": True, **options}
    rng = np.random.RandomState(0)
    start = [rng.normal(size=size) for size in (40, 7)]
    many, one = ([*weights(start, k, dtype="float16")] for k in (3, 1))
    mine = Trainer(many, optimizer, dict(options))
    theirs = gluon.Trainer(one, optimizer, dict(options), kvstore=None)
    for _ in range(20):
        grads = [rng.randint(-9, 10, (3, *param.shape)) for param in many]
        give_grads(many, grads)
        give_grads(one, [[grad.sum(axis=0)] for grad in grads])
        mine.step(4)
        theirs.step(4)
    for param, other, value in zip(many, one, start):
        want = other.data().asnumpy()
        assert (want != value.astype("float16")).mean() > 0.3
        for copy in param.list_data():
            assert copy.asnumpy().tobytes() == want.tobytes()
    states = [a for a in flatten(mine._updater.states.values()) if a is not None]
    assert {np.dtype(state.dtype).name for state in states} == {"float32"}


def flatten(nest):
    for part in nest:
        yield from flatten(part) if isinstance(part, (tuple, list)) else [part]


def test_parameters_of_several_dtypes_are_trained_together():
    """Exact: all in powers of two. Neighbours of different dtypes cannot share a bucket."""
    dtypes = ["float32", "float16", "float64", "float32"]
    params = [weights([[1.0, 2.0]], 3, dtype=dtype)[0] for dtype in dtypes]
    for optimizer in ("sgd", "test"):
        options = {"learning_rate": 0.5, "multi_precision": True}
        trainer = Trainer(params, optimizer, options)
        for param in params:
            param.set_data(mx.nd.array([1.0, 2.0]))
        give_grads(params, [[1.0, 2.0, 5.0]] * 4)
        trainer.step(4)
        moved = 1.0 if optimizer == "sgd" else 2.0  # 'test' adds its gradients, without a rate
        sign = -1 if optimizer == "sgd" else 1
        for param in params:
            for value in param.list_data():
                assert value.asnumpy().tolist() == [1 + sign * moved, 2 + sign * moved]
