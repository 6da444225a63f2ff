"""Ctrl-C: nothing that MXNet's engine waits for is interrupted, and no replica is left behind."""

import pathlib
import re
import signal
import threading

import mxnet as mx
import pytest
from mxnet import gluon
from processes import run_python

import gluonpar
from gluonpar import collectives
from gluonpar.collectives import executor
from gluonpar.runtime import engine, interrupts

INTERRUPTED = pathlib.Path(__file__).parents[1] / "support" / "interrupted.py"
CTX = [mx.cpu(0), mx.cpu(1)]


def ctrl_c(*_):
    signal.raise_signal(signal.SIGINT)


def values(copies):
    return [array.asnumpy().tolist() for array in copies]


def test_a_function_that_runs_at_once_ends_before_ctrl_c_is_raised_by_push():
    array, ended = mx.nd.zeros((1,)), []
    mx.nd.waitall()  # wait_to_read() returns before its own read has ended

    def interrupted():
        ctrl_c()
        ended.append(threading.current_thread() is threading.main_thread())

    with pytest.raises(KeyboardInterrupt):
        engine.push(interrupted, mx.cpu(0), writes=[array], inline=True)
    assert ended == [True] and array.asscalar() == 0


def test_ctrl_c_twice_in_nested_contexts_is_raised_once_at_the_end():
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts.held():
            with interrupts.held():
                ctrl_c()
            ctrl_c()
            reached.append("the end")
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_sum_that_is_interrupted_between_two_hops_is_complete(monkeypatch):
    add = executor.COMBINE["sum"]

    def interrupted(*arguments, **options):
        ctrl_c()
        return add(*arguments, **options)

    data = [mx.nd.full((3,), i + 1, ctx=mx.cpu(i)) for i in range(3)]
    monkeypatch.setitem(executor.COMBINE, "sum", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collectives.allreduce(data, "star")
    assert values(data) == [[6.0] * 3] * 3


class Interrupted(mx.optimizer.Optimizer):
    """param -= gradient; the update of the second parameter is interrupted."""

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        if index == 1:
            ctrl_c()
        weight[:] = weight - grad


def test_an_update_that_is_interrupted_is_complete_on_all_devices():
    params = gluon.ParameterDict()
    arrays = [params.get(f"p{i}", shape=(2,), init=mx.init.One()) for i in range(3)]
    params.initialize(ctx=CTX)
    trainer = gluonpar.Trainer(params, Interrupted())
    with mx.autograd.record():
        losses = [sum(p.data(c).sum() for p in arrays) for c in CTX]
    mx.autograd.backward(losses)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(1)
    assert [values(p.list_data()) for p in arrays] == [[[-1.0] * 2] * 2] * 3
    with pytest.raises(UserWarning):  # these gradients have been used
        trainer.step(1)


WORK = ["allreduce", "hops", "train_batch", "trainer", "kvstore", "sync_batch_norm", "data"]


@pytest.mark.slow
@pytest.mark.parametrize("work", WORK)
def test_after_500_interrupts_the_next_step_works_and_replicas_are_alike(work):
    printed = run_python(INTERRUPTED.read_text(), work, 500, seconds=500)
    assert re.fullmatch(rf"{work}: 500 interrupts, \d+ steps, alike: True\n", printed)
