"""run_tasks: one task per device's shard, results in order, errors that name the device."""

import os
import re
import signal
import threading
import traceback
import types

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluonpar
from gluonpar.adapters.estimator import BatchProcessor
from gluonpar.adapters.towers import Towers
from gluonpar.batch_norm.running_statistics import average_statistics
from gluonpar.batch_norm.sync_batch_norm import SyncBatchNorm
from gluonpar.gluon.trainer import Trainer
from gluonpar.tasks import TaskError, run_tasks
from tests.support.contexts import contexts, device


def test_the_callers_contexts_keep_the_scopes_that_they_were_entered_in():
    outer, inner = contexts(3)[2], device(1)
    seen = []

    def task(shard):
        seen.append(run_tasks(lambda _: mx.current_context(), [shard], [inner])[0])
        seen.append(mx.current_context())

    with outer:
        with inner:
            run_tasks(task, [0], [inner])
        seen.append(mx.current_context())
    assert seen == [inner, inner, outer]


def test_fewer_shards_than_contexts_run_on_the_first():
    def used(shard):
        return mx.context.current_context()

    for task in (used, types.SimpleNamespace(forward_backward=used)):
        assert run_tasks(task, [0, 0], contexts(3)) == contexts(2)


def test_dropout_inside_differs_per_device_and_repeats_with_the_seed():
    def task(shard):
        with autograd.record():
            # MXNet does not seed cuDNN's dropout by mx.random.seed.
            return mx.nd.Dropout(mx.nd.ones((1000,)), p=0.5, cudnn_off=True)

    def draw():
        mx.random.seed(3)
        return [a.asnumpy().tobytes() for a in run_tasks(task, [0, 1], contexts(2))]

    first = draw()
    assert first == draw()
    assert first[0] != first[1]


def random_numbers(shard):
    return mx.nd.random.uniform(shape=(shard,)).asnumpy().tolist()


def test_with_one_device_random_numbers_are_those_of_a_plain_loop():
    for seeds in ({"ctx": device(0), "seed_state": 11}, *({"seed_state": n} for n in (5, 5, 0))):
        mx.random.seed(**seeds)
        with device(0):
            plain = [random_numbers(4) for _ in range(3)]
        mx.random.seed(**seeds)
        assert [run_tasks(random_numbers, [4], device(0))[0] for _ in range(3)] == plain


def test_a_seed_for_one_context_leaves_the_others():
    mx.random.seed(1)
    first = run_tasks(random_numbers, [3, 3], contexts(2))
    mx.random.seed(1)
    mx.random.seed(2, ctx=device(1))
    again = run_tasks(random_numbers, [3, 3], contexts(2))
    assert again[0] == first[0] and again[1] != first[1]


def test_each_device_has_a_thread_which_is_kept_also_for_tasks_within_its_task():
    def idents(shard=0):
        return threading.get_ident()

    def outer(shard):
        return run_tasks(idents, [shard], mx.context.current_context())[0]

    first = run_tasks(idents, "abc", contexts(3))
    assert len({*first, idents()}) == 4
    assert run_tasks(idents, "abc", contexts(3)) == run_tasks(outer, "abc", contexts(3)) == first


def test_a_task_records_and_trains_if_its_caller_does():
    def flags(shard):
        return autograd.is_recording(), autograd.is_training(), mx.util.is_np_array()

    assert run_tasks(flags, [0], device(0)) == [(False, False, False)]
    with autograd.record(train_mode=False), mx.util.np_array(True):
        assert run_tasks(flags, [0], device(0)) == [(True, False, True)]
    with autograd.record():
        assert run_tasks(flags, [0], device(0)) == [(True, True, False)]
    assert run_tasks(flags, [0], device(0)) == [(False, False, False)]


def test_ctrl_c_is_raised_when_all_tasks_have_returned():
    ran = []

    def task(shard):
        signal.raise_signal(signal.SIGINT)
        ran.append(shard)

    with pytest.raises(KeyboardInterrupt):
        run_tasks(task, [0], device(0))
    assert ran == [0]


def test_a_second_ctrl_c_does_not_wait():
    raised, go_on, ran = threading.Event(), threading.Event(), []

    def handler(*_):
        if not raised.is_set():
            raised.set()
            raise KeyboardInterrupt

    def task(shard):
        ran.append(shard)
        while not raised.wait(0.01):
            os.kill(os.getpid(), signal.SIGINT)
        go_on.wait()

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_tasks(task, [0, 1], contexts(2))
        go_on.set()
        assert ran == [0]
        assert run_tasks(lambda shard: shard, [2, 3], contexts(2)) == [2, 3]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_batch_with_fewer_labels_than_samples_is_refused():
    """Split on their own, of three shards of samples only two would have labels."""
    batch, ctx = (mx.nd.ones((3, 2)), mx.nd.ones((2, 1))), contexts(3)
    used = types.SimpleNamespace(net=on_three(ctx=ctx), loss=gluon.loss.L2Loss(), context=ctx)
    with pytest.raises(ValueError, match=r"same length .*\(3, 2\).*\(2, 1\)"):
        BatchProcessor().fit_batch(used, batch)


def test_an_error_names_the_device_and_its_cause_and_ends_the_call_without_a_trace():
    """No later task runs, and no thread, recording or context is left behind."""
    run_tasks(str, [0, 1, 2], contexts(3))
    ran, before, ctx = [], set(threading.enumerate()), mx.context.current_context()
    error = KeyError("bad box")

    def forward_backward(shard):
        ran.append(shard)
        with autograd.record():
            if shard == 1:
                raise error

    with pytest.raises(TaskError, match=r"failed on [cg]pu\(1\): KeyError: 'bad box'") as caught:
        run_tasks(forward_backward, [0, 1, 2], contexts(3))
    assert caught.value.ctx == device(1)
    assert caught.value.__cause__ is error
    assert "in forward_backward" in "".join(traceback.format_tb(error.__traceback__))
    assert ran == [0, 1]
    assert set(threading.enumerate()) <= before
    assert not autograd.is_recording()
    assert mx.context.current_context() == ctx


@pytest.mark.parametrize(
    ("task", "shards", "error", "words"),
    [
        (len, [], ValueError, "1 to 2, .*got 0"),
        (len, "abc", ValueError, "1 to 2, .*got 3"),
        (7, "ab", TaskError, r"on [cg]pu\(0\): TypeError: 'int' object is not callable"),
    ],
)
def test_bad_requests_are_refused_with_their_values(task, shards, error, words):
    with pytest.raises(error, match=words):
        run_tasks(task, shards, contexts(2))


TWICE = [device(1), device(0), device(1)]


def on_three(layer=lambda: nn.Dense(1, in_units=2), ctx=TWICE):
    net = layer()
    net.initialize(mx.init.One(), ctx=ctx)
    return net


REPLICATED = {
    "Trainer": lambda: Trainer(on_three().collect_params(), "sgd"),
    "Trainer, shapes unknown": lambda: Trainer(
        on_three(lambda: nn.Dense(1)).collect_params(), "sgd"
    ),
    "run_tasks": lambda: run_tasks(len, [(1,), (), ()], TWICE),
    "Towers": lambda: Towers(lambda batch, net: net(batch), on_three(), TWICE),
    "SyncBatchNorm": lambda: on_three(lambda: SyncBatchNorm(2))(mx.nd.ones((3, 2), ctx=device(1))),
    "statistics": lambda: average_statistics(on_three(lambda: nn.BatchNorm(in_channels=2))),
}


@pytest.mark.parametrize("replicate", REPLICATED.values(), ids=REPLICATED)
def test_a_context_listed_twice_is_refused_where_a_block_is_replicated(replicate):
    with pytest.raises(ValueError, match=re.escape(f"{device(1)} more than once in {TWICE}")):
        replicate()


def test_a_context_listed_twice_trains_as_one_device_where_arrays_are_replicated():
    X, y = np.arange(10, dtype="float32").reshape(5, 2), np.zeros(5, "float32")

    def trained(ctx):
        copies = [gluonpar.get_params([mx.nd.ones((2, 1))], c) for c in ctx]
        model, loss = lambda X, params: mx.nd.dot(X, params[0]), lambda out, y: out[:, 0] ** 2
        gluonpar.train_batch(X, y, copies, ctx, 1 / 64, model, loss)
        return [params[0].asnumpy() for params in copies]

    for values in trained(TWICE):
        np.testing.assert_array_equal(values, trained(contexts(1))[0])
