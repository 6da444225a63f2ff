"""What users do to parameters, devices and trainers between gluonpar.Trainer's steps."""

import types

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

import gluonpar
from gluonpar.gluon.trainer import Trainer
from tests.support import gluon_runs as runs
from tests.support.gluon_runs import assert_as_one, contexts, give_grads, weights


@pytest.mark.parametrize("change", ["cast", "initialize", "freeze"])
def test_parameters_may_be_changed_between_steps(change):
    results, dtype = [], "float64" if change == "cast" else "float32"
    for k, kind in ((1, runs.stock_trainer), (3, Trainer)):
        net = runs.mlp(contexts(k))
        trainer = kind(net.collect_params(), "sgd", {"learning_rate": 0.05})
        runs.train(net, trainer, runs.batches((7, 8)), contexts(k))
        if change == "cast":
            net.cast(dtype)
        elif change == "freeze":
            net[0].bias.grad_req = "null"  # oneDNN writes no bias without its weight
        else:
            net.initialize(ctx=contexts(k), force_reinit=True)
            runs.fill(net, runs.start_values(seed=9))
        runs.train(net, trainer, runs.batches((8, 2, 9), dtype=dtype), contexts(k))
        results.append(net)
    assert_as_one(results[1], runs.values(results[0]))
    assert results[1][0].weight.list_data()[2].dtype == np.dtype(dtype)


OPTIONS = {"ring": {"algorithm": "ring"}, "fp16": {"compression": "fp16"}}


@pytest.mark.parametrize("how", ["sgd", "adam", "ring", "fp16", "clipped"])
def test_a_step_inside_record_is_the_step_outside(how):
    """Also with an idle device; autograd would refuse to change what is in its graph."""
    results = []
    for scope in (autograd.record, autograd.pause):
        ctx = contexts(2)
        net = runs.mlp(ctx)
        optimizer = "adam" if how == "adam" else "sgd"
        trainer = Trainer(net.collect_params(), optimizer, **OPTIONS.get(how, {}))
        for batch in runs.batches((4, 1, 4, 1)):
            with scope():
                runs.backward(net, batch, ctx)
                if how == "clipped":
                    trainer.allreduce_grads()
                    trainer.clip_global_norm(0.5)
                    trainer.update(len(batch[0]))
                else:
                    trainer.step(len(batch[0]))
        results.append(runs.bits(net.collect_params().values()))
    assert results[0] == results[1]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "number",
    [mx.nd.array([4]), mx.nd.array([[4]], dtype="int32"), mx.np.array(4), np.array([4]), 4.0],
    ids=repr,
)
def test_the_batch_size_may_be_any_number_or_an_array_of_one(number, optimizer):
    """Such as a count of tokens."""
    updated = []
    for batch_size in (number, 4):
        params = weights([[1.0, 2.0]], 2)
        trainer = Trainer(params, optimizer, {"learning_rate": 1.0})
        give_grads(params, [[2.0, 6.0]])
        trainer.step(batch_size)
        updated.append(params[0].list_data()[1].asnumpy().tolist())
    assert updated[0] == updated[1] != [1, 2]


@pytest.mark.parametrize("number", [0, -4, np.nan, np.inf, "8", mx.nd.array([4, 4]), [4]], ids=repr)
def test_a_batch_size_that_is_no_number_of_samples_changes_nothing(number):
    params = weights([[1.0, 2.0]], 2)
    trainer = Trainer(params, "sgd")
    give_grads(params, [[2.0, 6.0]])
    before = runs.bits(params)
    with pytest.raises(ValueError, match="batch_size"):
        trainer.step(number)
    with pytest.raises(ValueError, match="batch_size|allreduce_grads"):
        trainer.update(number)  # it takes what is left of an overflow
    with pytest.raises(ValueError, match="batch_size"):
        gluonpar.sgd([param.list_data()[0] for param in params], 0.1, number)
    assert runs.bits(params) == before


@pytest.mark.parametrize("accumulate", [False, True])
def test_an_overflow_skips_the_update_and_nothing_else(accumulate):
    """What MXNet's mixed precision puts into a trainer; afterwards no sum is left over."""
    params = weights([[1.0]], 2)
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    seen = []

    def has_overflow(given):
        seen.append([float(given[0].list_grad()[k].asscalar()) for k in range(2)])
        return np.isinf(seen[-1]).any()

    trainer._amp_loss_scaler = types.SimpleNamespace(has_overflow=has_overflow)
    for grad in (np.inf, 2.0):
        if accumulate:
            with trainer.no_sync():
                give_grads(params, [[grad, 1.0]])
        else:
            give_grads(params, [[grad, 1.0]])
        trainer.step(1)
    assert seen == [[np.inf, np.inf], [3.0, 3.0]]
    assert params[0].list_data()[1].asscalar() == -2
