"""Which gradients count after a sum by hand, and after tasks of which one failed."""

import gluon_runs as runs
import mxnet as mx
import pytest
from any_program import check
from contexts import contexts
from gluon_runs import assert_as_one
from mxnet import autograd, gluon

import gluonpar
from gluonpar.gluon.trainer import Trainer


@pytest.mark.parametrize("before", [[], [("sum", (0,))]], ids=["", "after a sum that is not used"])
def test_passes_add_to_one_of_the_sums_that_a_program_made(before):
    """grad_req='add' without zero_grad after the step."""
    batch, after = [(0, n, 0, "one backward", n) for n in (4, 3)]
    program = [("require", (1, "add")), *before, ("sum_by_hand", batch), ("train", after)]
    check(None, "sgd", False, 2, program)


def losses_of(parts, x):
    return sum((part(x) ** 2).sum(axis=1) for part in parts)


def run_tasks(forward_backward, shards, ctx):
    gluonpar.run_tasks(forward_backward, shards, ctx)


def towers(forward_backward, shards, ctx):
    """A step of Towers on other variables, whose forward is the task."""

    def forward(x, variables):
        with autograd.record():
            forward_backward(x)
        return (x[:, 0] * variables[0]) ** 2

    gluonpar.Towers(forward, [mx.nd.ones((1,))], ctx).step(shards, lr=0.1)


@pytest.mark.parametrize("call", [run_tasks, towers])
@pytest.mark.parametrize("make", [Trainer, lambda *a: gluon.Trainer(*a, kvstore="gluonpar")])
def test_gradients_of_a_failed_call_count_in_no_later_step(make, call):
    """One device has computed gradients of a layer when another fails; the next batch leaves it."""
    nets, k, batches = [], 2, [mx.nd.random.normal(shape=(n, 3)) for n in (4, 5)]
    for ctx in contexts(1), contexts(k):
        parts = [gluon.nn.Dense(2, in_units=3, prefix=f"part{i}_") for i in range(2)]
        net = gluon.nn.HybridSequential()
        net.add(*parts)
        net.initialize(ctx=ctx)
        runs.fill(net, [mx.nd.ones(p.shape).asnumpy() for p in net.collect_params().values()])
        trainer = (make if nets else runs.stock_trainer)(net.collect_params(), "sgd")
        nets.append(net)

        def forward_backward(x, last=ctx[-1], parts=parts):
            if x.context == last:
                raise KeyError
            with autograd.record():
                losses = losses_of(parts, x)
            losses.backward()

        with pytest.raises((KeyError, RuntimeError)):
            call(forward_backward, gluonpar.split_and_load(batches[0], ctx), ctx)
        with autograd.record():
            losses = [losses_of(parts[:1], x) for x in gluonpar.split_and_load(batches[1], ctx)]
        autograd.backward(losses)
        trainer.step(5, ignore_stale_grad=True)
    assert_as_one(nets[1], runs.values(nets[0]))
