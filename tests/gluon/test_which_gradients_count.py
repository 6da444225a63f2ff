"""Only the gradients of a step's own backward count, whatever other backward passes there were.

A device without samples keeps the gradient of some earlier pass: of another network's loss, of a
batch that was skipped. One device, with MXNet's own Trainer, is what all are compared with.
"""

from concurrent.futures import ThreadPoolExecutor

import gluon_runs as runs
import numpy as np
import pytest
from batch_programs import HOWS, PROGRAMS, TRAINERS, check, dense, differentiate, losses_of
from gluon_runs import contexts
from mxnet import autograd

from gluonpar import run_tasks, split_and_load
from gluonpar.gluon.trainer import Trainer


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("trainer", "k"),
    [
        *(("host", 2), ("host", 3), ("adam", 2), ("ring", 3)),
        *(("kvstore", 2), ("kvstore", 3), ("own loop", 2)),
    ],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_trains_as_one_device_does(program, k, trainer, how):
    check(program, k, trainer, how)


@pytest.mark.parametrize("trainer", ["host", "kvstore"])
def test_another_thread_takes_a_step_between_the_passes_of_two_devices(trainer):
    """Of another network; before, it took one of this network."""

    def step(i, between=list):
        with autograd.record():
            first, second = (value * 2 for value in nets[i][0].list_data())
        first.backward()
        between()
        second.backward()
        trainers[i].step(1)
        return [value.asscalar() for value in nets[i][0].list_data()]

    nets = [runs.weights([[1.0]], 2) for _ in range(2)]
    trainers = [TRAINERS[trainer](params, "sgd", {"learning_rate": 1.0}) for params in nets]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(step, 0).result() == [-3.0, -3.0]
        assert step(0, lambda: thread.submit(step, 1).result()) == [-7.0, -7.0]
        assert step(1) == [-7.0, -7.0]


@pytest.mark.parametrize("how", ["a pass each", "device by device", "run_tasks"])
@pytest.mark.parametrize("trainer", ["host", "kvstore"])
def test_two_threads_train_two_networks_at_the_same_time(trainer, how):
    """By graphs that take longer than starting the threads."""

    def train(params):
        def loss(x):
            return sum(params[0].data(x.context) * x for _ in range(200))

        made = TRAINERS[trainer](params, "sgd", {"learning_rate": 1.0})
        batch, ctx = np.ones((2, 1), "float32"), contexts(2)
        for _ in range(9):
            if how == "run_tasks":
                with autograd.record():
                    losses = run_tasks(loss, split_and_load(batch, ctx), ctx)
                run_tasks(lambda one: one.backward(), losses, ctx)
            else:
                differentiate(loss, batch, ctx, how)
            made.step(400)
        return [value.asscalar() for value in params[0].list_data()]

    with ThreadPoolExecutor(2) as threads:
        trained = threads.map(train, [runs.weights([[1.0]], 2), runs.weights([[1.0]], 2)])
        assert [*trained] == [[-8.0, -8.0]] * 2


def test_skip_nonfinite_counts_the_batches_that_are_not_finite_only():
    """The last batch is good; the one before it left NaN on the device that has no sample now."""
    ctx = contexts(2)
    net = dense("net_", ctx, 1, 1)
    trainer = Trainer(net.collect_params(), "sgd", skip_nonfinite=True)
    for batch in ([[np.nan] * 4] * 4, [[1.0] * 4]):
        autograd.backward(losses_of(net, np.array(batch, "float32"), ctx))
    before = net.weight.list_data()[1].asnumpy()
    trainer.step(1)
    assert trainer.num_skipped == 0
    np.testing.assert_allclose(net.weight.list_data()[1].asnumpy(), before - 0.01, rtol=1e-5)
