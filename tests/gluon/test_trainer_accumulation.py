"""Several backwards before one step: gradients are added up, and exchanged once."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from gluonpar.gluon.trainer import Trainer
from tests.support import gluon_runs as runs
from tests.support.gluon_runs import assert_as_one, contexts, give_grads, weights


def test_no_sync_may_be_entered_while_autograd_records():
    def steps(k, kind):
        ctx, net = contexts(k), runs.mlp(contexts(k))
        net.collect_params().setattr("grad_req", "add")
        trainer = kind(net.collect_params(), "sgd", {"learning_rate": 0.05})
        within = getattr(trainer, "no_sync", contextlib.nullcontext)
        with autograd.record(), within():  # MXNet's way to zero arrays crashes where it is recorded
            losses = [net(mx.nd.full((2, 6), i + 1, ctx=ctx[i % k])).sum() for i in range(2)]
        autograd.backward(losses)
        trainer.step(4)
        return net

    assert_as_one(steps(2, Trainer), runs.values(steps(1, runs.stock_trainer)))


def test_the_next_update_ends_the_accumulation_whichever_trainer_does_it():
    params = weights([[0.0]], 2)
    with Trainer(params, "sgd", {"learning_rate": 1.0}).no_sync():
        give_grads(params, [[1.0, 2.0]])
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    for grad, want in ((4.0, -11), (16.0, -43)):
        give_grads(params, [[grad, grad]])
        trainer.step(1)
        assert params[0].list_data()[1].asscalar() == want
        give_grads(params, [[64.0, 64.0]])  # of a backward that is never used


def test_no_sync_begins_with_zeros_where_gradients_are_added():
    params = weights([[0.0]], 2)
    params[0].grad_req = "add"
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    give_grads(params, [[64.0, 64.0]])  # of a batch that is skipped
    with trainer.no_sync():
        give_grads(params, [[1.0, 2.0]])
    trainer.step(1)
    assert params[0].list_data()[1].asscalar() == -3


def test_parameters_that_are_thawed_inside_no_sync_accumulate_from_then_on():
    params = weights([[0.0], [0.0]], 2)
    params[1].grad_req = "null"
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    with trainer.no_sync():
        give_grads(params[:1], [[1.0, 1.0]])
        params[1].grad_req = "write"
        for grad in (4.0, 16.0):
            give_grads(params, [[grad, grad]] * 2)
    trainer.step(1)
    assert [param.list_data()[1].asscalar() for param in params] == [-42, -40]


@pytest.mark.parametrize("what", ["step", "update", "allreduce_grads", "step after an inner one"])
def test_nothing_can_be_exchanged_inside_no_sync(what):
    params = weights([[1.0]], 2)
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    with trainer.no_sync():
        give_grads(params, [[1.0, 2.0]])
        if "inner" in what:
            with trainer.no_sync():
                give_grads(params, [[1.0, 0.0]])
        before = runs.bits(params)
        arguments = () if what == "allreduce_grads" else (1,)
        with pytest.raises(ValueError, match="inside no_sync"):
            getattr(trainer, what.split()[0])(*arguments)
        assert runs.bits(params) == before
    trainer.step(1)
    assert params[0].list_data()[0].asscalar() == (-3 if "inner" in what else -2)


# In MXNet 1.9.1 these write where grad_req='add' says to add, or add to other memory.
OVERWRITING = {
    "mean": lambda w: w.mean(),
    "clip": lambda w: w.clip(-9, 9),
    "flip": lambda w: w.flip(0),
    "cumsum": lambda w: mx.nd.cumsum(w),
    "det": lambda w: mx.nd.linalg.det(w.reshape((1, 2, 2))),
    "dot": lambda w: mx.nd.dot(w, w),  # adds, as it should
}


@pytest.mark.cpu("not all of these operators have a simulated kernel")
@pytest.mark.parametrize("inside", [2, 3])
@pytest.mark.parametrize("operator", OVERWRITING)
def test_micro_batches_add_up_whatever_operator_writes_the_gradient(operator, inside):
    params = weights([[1.0, 2.0, 3.0, 5.0]], 2)
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})

    def micro_batch(factors):
        with autograd.record():
            losses = [
                OVERWRITING[operator](value) * factor
                for value, factor in zip(params[0].list_data(), factors)
            ]
        for loss in losses:  # a pass per device
            loss.backward()

    micro_batch([1.0, 0.0])
    once = params[0].list_grad()[0].asnumpy()
    with trainer.no_sync():
        for i in range(inside):
            micro_batch([1.0, 2.0**i])
    micro_batch([4.0])  # and one of a single sample
    times = inside + sum(2.0**i for i in range(inside)) + 4
    trainer.step(1)
    for value in params[0].list_data():
        np.testing.assert_allclose(value.asnumpy(), [1, 2, 3, 5] - times * once, rtol=1e-5)


def test_micro_batches_add_up_if_devices_run_backward_at_once():
    """Each on a thread of its own, with a graph that takes longer than starting the threads."""
    params, num_batches = weights([[0.0]], 2), 8
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    with trainer.no_sync(), ThreadPoolExecutor(2) as threads:
        for _ in range(num_batches):
            with autograd.record():
                losses = [sum(value * 1 for _ in range(300)) for value in params[0].list_data()]
            [*threads.map(lambda loss: loss.backward(), losses)]
    trainer.step(300)
    assert params[0].list_data()[0].asscalar() == -2 * num_batches


def test_no_sync_names_a_parameter_without_a_shape():
    net = runs.mlp(contexts(2), deferred=True)
    trainer = Trainer(net.collect_params(), "sgd")
    with pytest.raises(gluon.parameter.DeferredInitializationError, match="mlp_dense0_weight"):
        with trainer.no_sync():
            pass
    runs.train(net, trainer, runs.batches(), contexts(2))
    assert_as_one(net, runs.stock())


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("k", [2, 3])
def test_after_an_exception_inside_no_sync_micro_batches_go_on_as_on_one_device(k, zero):
    """There MXNet's gradients are added to, and set to zero before each step."""
    nets = []
    for ctx, kind in ((contexts(1), runs.stock_trainer), (contexts(k), Trainer)):
        net = runs.mlp(ctx)
        trainer = kind(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        within = getattr(trainer, "no_sync", contextlib.nullcontext)
        if kind is not Trainer:
            net.collect_params().setattr("grad_req", "add")
        batches = runs.batches((8, 1, 7, 8))
        with pytest.raises(KeyError), within():
            for batch in batches[:2]:
                runs.backward(net, batch, ctx)
            raise KeyError("the loader failed")
        if zero:
            net.collect_params().zero_grad()
        with within():
            runs.backward(net, batches[2], ctx)
        trainer.step(16)
        if kind is not Trainer:
            net.collect_params().zero_grad()
        runs.backward(net, batches[3], ctx)
        trainer.step(8)
        nets.append(net)
    assert_as_one(nets[1], runs.values(nets[0]))


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("k", [2, 3])
def test_after_a_step_that_skip_nonfinite_leaves_out_the_next_is_as_on_one_device(k, accumulates):
    """There the program leaves it out itself."""
    nets, bad = [], runs.batches((8, 8), seed=2)
    bad[1][0][-1] = np.inf  # the last device's
    for ctx, kind in ((contexts(1), gluon.Trainer), (contexts(k), Trainer)):
        net, options = runs.mlp(ctx), {"skip_nonfinite": True} if kind is Trainer else {}
        schedule = mx.lr_scheduler.FactorScheduler(1, 0.5, base_lr=0.1)
        how = {"learning_rate": 0.1, "momentum": 0.9, "lr_scheduler": schedule}
        trainer = kind(net.collect_params(), "sgd", how, **options)
        for i, batch in enumerate(runs.batches((8, 1, 7))):
            if i == 1 and kind is Trainer:
                with trainer.no_sync() if accumulates else contextlib.nullcontext():
                    for each in bad if accumulates else bad[1:]:
                        runs.backward(net, each, ctx)
                trainer.step(8)
            runs.backward(net, batch, ctx)
            trainer.step(len(batch[0]))
        nets.append(net)
    assert trainer.num_skipped == 1
    assert_as_one(nets[1], runs.values(nets[0]))
