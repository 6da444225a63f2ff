"""What gluonpar.Trainer refuses: the error names the cause, and nothing has changed."""

import functools
import re

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import gluonpar
from gluonpar.gluon.trainer import Trainer
from tests.support import gluon_runs as runs
from tests.support.gluon_runs import assert_as_one, contexts, give_grads, weights


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_unused_parameter_is_named(optimizer):
    params = weights([[1.0], [2.0]], 3)
    trainer = Trainer(params, optimizer, {"learning_rate": 1.0})
    give_grads(params, [[1.0, 2.0, 3.0], [None] * 3])
    before = runs.bits(params)
    with pytest.raises(UserWarning, match=r"parameter w1 .*ignore_stale_grad"):
        trainer.step(1)
    assert runs.bits(params) == before
    assert trainer._updaters[0].states == {} and trainer.optimizer.num_update == 0


@pytest.mark.parametrize("first", [0, 1])
def test_a_parameter_that_some_devices_use_is_not_stale_whichever_trainer_steps_first(first):
    """As on one device, where some samples use it."""
    params = weights([[1.0], [2.0]], 3)
    trainers = [Trainer([param], "sgd", {"learning_rate": 1.0}) for param in params]
    give_grads(params, [[1.0, 2.0, 3.0], [1.0, None, 3.0]])
    for i in (first, 1 - first):
        trainers[i].step(1)
    values = [[value.asscalar() for value in param.list_data()] for param in params]
    assert values == [[-5.0] * 3, [-2.0] * 3]


@pytest.mark.parametrize("own_sums", [False, True])
def test_a_static_network_that_is_initialised_anew(own_sums):
    """It writes to its first arrays, which ``list_grad`` returns from then on."""
    ctx, [batch] = contexts(2), runs.batches((8,))
    net = runs.mlp(ctx, hybridize=runs.STATIC)
    params = [*net.collect_params().values()]
    trainer = Trainer(params, "sgd", {"learning_rate": 0.05})
    runs.train(net, trainer, [batch], ctx)
    net.initialize(ctx=ctx, force_reinit=True)
    runs.fill(net, runs.start_values())
    runs.backward(net, batch, ctx)
    if own_sums:
        gluonpar.allreduce_many([param.list_grad() for param in params])
    else:
        trainer.allreduce_grads()
    trainer.update(8)
    assert_as_one(net, runs.stock("sgd", {"learning_rate": 0.05}, data=[batch]))


@pytest.mark.parametrize("k", [1, 3])
def test_a_step_without_backward_is_an_error(k):
    net, trainer = runs.run(k)
    params = list(net.collect_params().values())
    before, count = runs.bits(params), trainer.optimizer.num_update
    for call in (trainer.step, trainer.update):
        with pytest.raises(UserWarning, match="call backward before step"):
            call(8)
    assert (runs.bits(params), trainer.optimizer.num_update) == (before, count)
    trainer.step(8, ignore_stale_grad=True)
    assert trainer.optimizer.num_update == count
    assert runs.values(net)[0].tobytes() == before[0]


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
def test_a_maximum_norm_that_is_not_positive(max_norm):
    params = weights([[1.0]], 2)
    trainer = Trainer(params, "sgd")
    with pytest.raises(ValueError, match=f"max_norm must be positive, got {max_norm}"):
        trainer.clip_global_norm(max_norm)


def test_parameters_on_other_contexts_are_named():
    [here], [there] = weights([[1.0]], 2), weights([[1.0]], 3)
    there.name = "far"
    with pytest.raises(AssertionError, match="Parameter far"):
        Trainer([here, there], "sgd")
    there.reset_ctx(contexts(2))
    trainer = Trainer([here, there], "sgd", {"learning_rate": 1.0})
    there.reset_ctx(contexts(3))
    give_grads([here, there], [[1.0, 1.0], [1.0, 1.0, 1.0]])
    before = runs.bits([here, there])
    with pytest.raises(AssertionError, match="Parameter far"):
        trainer.step(1)
    assert runs.bits([here, there]) == before


def with_sparse_weights():
    embedding = gluon.contrib.nn.SparseEmbedding(4, 2)
    embedding.initialize(ctx=contexts(2))
    return embedding.collect_params()


TWICE = weights([[1.0]], 2) * 2


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        *(
            (x, ValueError, "a list or dict of Parameters")
            for x in (5, "text", [5], {"a": 5}, TWICE[0])
        ),
        *(
            (none, ValueError, "at least one Parameter, got none")
            for none in ([], {}, gluon.nn.Flatten().collect_params())
        ),
        (with_sparse_weights(), ValueError, "_weight must be dense.*got row_sparse with"),
        ([gluon.Parameter("w", shape=(1,))], RuntimeError, "'w' has not been initialized"),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(params, error, words):
    with pytest.raises(error, match=words):
        Trainer(params, "sgd")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kvstore": "dist_sync"}, "got 'dist_sync'.*mpirun"),
        ({"kvstore": "horovod"}, "got 'horovod'"),
        ({"algorithm": "magic"}, "ring.*got 'magic'"),
        ({"compression": "2bit"}, "'fp16', got '2bit'"),
        *(({"bucket_bytes": n}, f"positive.*got {n}") for n in (0, -1, 2.5)),
    ],
)
def test_options_that_do_not_exist_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Trainer(weights([[1.0]], 2), "sgd", **options)


@pytest.mark.parametrize("make", [Trainer, functools.partial(gluon.Trainer, kvstore="gluonpar")])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"params": TWICE}, "w0 is given more than once"),
        ({"update_on_kvstore": True}, "update_on_kvstore must be None.*gluon.Trainer"),
        ({"compression_params": {"type": "2bit"}}, "2bit.*compression='fp16'"),
    ],
)
def test_what_a_trainer_has_not_is_refused_whichever_way_it_is_made(make, options, words):
    with pytest.raises(ValueError, match=words):
        make(**{"params": weights([[1.0]], 2), "optimizer": "sgd", **options})


@pytest.mark.parametrize("make", [Trainer, functools.partial(gluon.Trainer, kvstore="gluonpar")])
@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -0.1, np.float32("nan"), "0.1"])
def test_a_learning_rate_that_is_no_rate_is_refused(make, lr):
    words = re.escape(f"finite number, got {lr!r}")
    for optimizer in (("sgd", {"learning_rate": lr}), (mx.optimizer.Adam(lr),)):
        with pytest.raises(ValueError, match=words):
            make(weights([[1.0]], 2), *optimizer)
    trainer = make(weights([[1.0]], 2), "sgd", {"learning_rate": 0.5})
    with pytest.raises(ValueError, match=words):
        trainer.set_learning_rate(lr)
    assert trainer.learning_rate == 0.5
    trainer.set_learning_rate(0)  # the first rate of a warm-up
    assert trainer.learning_rate == 0


def test_the_first_rate_of_a_schedule_is_not_asked_for():
    calls = []
    Trainer(weights([[1.0]], 2), "sgd", {"lr_scheduler": calls.append})
    assert calls == []


def test_gradients_that_were_clipped_by_nan_are_left_out():
    params = weights([[1.0], [2.0]], 2)
    trainer = Trainer(params, "sgd", {"learning_rate": 0.5}, skip_nonfinite=True)
    give_grads(params, [[1.0, 1.0], [1.0, float("nan")]])
    trainer.allreduce_grads()
    trainer.clip_global_norm(1.0)  # all gradients are NaN now
    trainer.update(1)
    values = [value.asscalar() for param in params for value in param.list_data()]
    assert values == [1.0, 1.0, 2.0, 2.0] and trainer.num_skipped == 1


def test_an_optimizer_that_draws_numbers_is_refused_in_several_processes(monkeypatch):
    monkeypatch.setattr(gluonpar.cluster, "size", lambda: 2)
    with pytest.raises(ValueError, match="SGLD"):
        gluonpar.Towers(len, [mx.nd.ones((1,))], contexts(1), mx.optimizer.SGLD())
    params = weights([[1.0]], 1)
    with pytest.raises(ValueError, match="SGLD"):
        Trainer(params, "sgld")
    with pytest.raises(ValueError, match="SGLD"):
        gluon.Trainer(params, "sgld", kvstore=mx.kv.create("gluonpar"))
