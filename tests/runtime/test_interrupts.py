"""Ctrl-C: nothing that MXNet's engine waits for is interrupted, and no replica is left behind."""

import contextlib
import pathlib
import signal
import threading
import time

import mxnet as mx
import pytest
from mxnet import gluon

import gluonpar
from gluonpar import collectives
from gluonpar.collectives import executor
from gluonpar.runtime import engine, interrupts
from tests.support.processes import run_fork

INTERRUPTED = pathlib.Path(__file__).parents[1] / "support" / "interrupted.py"
CTX = [mx.cpu(0), mx.cpu(1)]


def ctrl_c(*_):
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def handled():
    """handled(number, handler) sets a signal's handler until the end of the test."""
    with contextlib.ExitStack() as restored:

        def handle(number, handler):
            restored.callback(signal.signal, number, signal.signal(number, handler))

        yield handle


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


def test_a_sum_that_is_interrupted_between_two_hops_is_complete(monkeypatch):
    add = executor.OPERATORS["sum"]

    def interrupted(*arguments, **options):
        ctrl_c()
        return add(*arguments, **options)

    data = [mx.nd.full((3,), i + 1, ctx=mx.cpu(i)) for i in range(3)]
    monkeypatch.setitem(executor.OPERATORS, "sum", interrupted)
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


WORK = ["Allreduce", "Hops", "TrainBatch", "Trainer", "RunTasks", "Data"]


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("number", [20, pytest.param(150, marks=pytest.mark.slow)])
def test_after_handlers_that_raise_replicas_are_alike_and_train_as_one_device_does(work, number):
    """Ctrl-C, and a time limit by SIGALRM, at random moments."""
    printed = run_fork(INTERRUPTED.read_text(), work, number)
    assert printed == f"{work}: {number} signals, alike: True, goes on: True\n"


@pytest.mark.slow
@pytest.mark.parametrize("work", WORK)
def test_sys_exit_in_a_handler_ends_the_process_with_its_code_and_prints_nothing(work):
    printed = run_fork(INTERRUPTED.read_text(), work, 12, "exits")
    assert printed == f"{work}: 12 exits, wrong: 0\n"


def test_a_program_sees_its_own_handlers(handled):
    def mine(*_):
        raise KeyError

    handled(signal.SIGUSR1, mine)
    assert signal.getsignal(signal.SIGUSR1) is mine
    with pytest.raises(KeyError), interrupts.held():
        signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(KeyError):
        signal.raise_signal(signal.SIGUSR1)
    assert signal.signal(signal.SIGUSR1, signal.SIG_IGN) is mine
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    signal.raise_signal(signal.SIGUSR1)


def test_each_signal_that_waits_is_handled_once_and_the_others_after_one_that_raised(handled):
    calls = []

    def limit(*_):
        calls.append("alarm")
        raise TimeoutError

    handled(signal.SIGALRM, limit)
    handled(signal.SIGUSR1, lambda *_: calls.append("user"))
    with pytest.raises(TimeoutError), interrupts.held():
        with interrupts.held():
            signal.raise_signal(signal.SIGALRM)
        for number in (signal.SIGUSR1, signal.SIGALRM):
            signal.raise_signal(number)
        assert not calls
    with interrupts.held():
        pass
    assert calls == ["alarm", "user"]


class Ends:
    def __del__(self):
        ctrl_c()
        self.ended.append(True)


def test_a_handler_is_not_called_in_a_destructor_where_its_exception_would_be_dropped():
    Ends.ended = []
    ends = Ends()
    with pytest.raises(KeyboardInterrupt):
        del ends
        for _ in range(600):  # Python may sleep on if a signal comes just before it does
            time.sleep(0.1)
    assert Ends.ended == [True]


def test_the_second_ctrl_c_in_run_tasks_does_not_wait_and_the_next_step_is_right():
    """The first one waits for the tasks; the gradients of neither call count."""
    params = gluon.ParameterDict()
    param = params.get("w", shape=(1,), init=mx.init.One())
    params.initialize(ctx=CTX)
    trainer = gluonpar.Trainer(params, "sgd", {"learning_rate": 1.0})
    begun, go_on, raised = threading.Barrier(2), threading.Event(), threading.Event()

    def task(x):
        with mx.autograd.record():
            loss = param.data(x.context) * x
        loss.backward()
        if x.context == CTX[0]:
            begun.wait(60)
            go_on.wait(60)

    shards = [mx.nd.array([x], ctx=c) for x, c in zip((100, 200), CTX)]

    def interrupt():
        begun.wait(60)
        while not raised.is_set():  # two that come at the same time are one
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            raised.wait(0.1)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        gluonpar.run_tasks(task, shards, CTX)
    raised.set()
    go_on.set()
    other.join()
    gluonpar.run_tasks(lambda x: None, shards, CTX)  # the device's thread is free
    with mx.autograd.record():
        loss = param.data(CTX[1]) * 1
    loss.backward()
    trainer.step(1)
    assert values(param.list_data()) == [[0.0], [0.0]]
