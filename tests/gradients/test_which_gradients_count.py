"""Only the gradients of a step's own backward count, whatever other backward passes there were.

A device without samples keeps the gradient of some earlier pass: of another network's loss, of a
batch that was skipped. One device, with MXNet's own Trainer, is what all are compared with.
"""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from gluonpar import TaskError, Towers, allreduce_grads, get_params, run_tasks, split_and_load
from gluonpar.gluon.trainer import Trainer
from tests.support import any_program, beside
from tests.support import gluon_runs as runs
from tests.support.any_program import TRAINERS
from tests.support.batch_passes import THREADS, differentiate, on_another_thread
from tests.support.contexts import device
from tests.support.gluon_runs import STATIC, contexts, give_grads

WAYS = ("one backward", "a loop", "the last device first", ("attack", "a loop", 0))
MORE_WAYS = (("three passes", "run_tasks", 1), ("a head first", "a thread each", 5))
NUM_PROGRAMS = 12
if device().device_type == "gpu":  # simulated ones are slower
    WAYS, MORE_WAYS, NUM_PROGRAMS = WAYS[::3], MORE_WAYS[:1], 5


@pytest.mark.parametrize(
    "kvstore, k, ways",
    [
        *((kvstore, 3, WAYS + MORE_WAYS) for kvstore in (None, "own loop")),
        ("ring", 2, WAYS[::2]),
    ],
)
@pytest.mark.parametrize("name", any_program.NAMED)
def test_named_programs_train_as_one(name, kvstore, k, ways):
    for way in ways:
        any_program.check_named(name, kvstore, k, way)


@pytest.mark.cpu("the process without gluonpar trains on CPU contexts")
@pytest.mark.parametrize("kvstore", beside.KVSTORES)
def test_what_mxnets_trainer_trains_has_the_bits_and_flags_of_a_process_without_gluonpar(kvstore):
    batches = [("backward", ([0, 1, 2], [0, 1], 2, False)), ("backward", ([0], [0], 1, False))]
    shared = [("share", ([0, 1, 2], [0, 1])), ("share", ([2, 1], [0])), ("share", ([0, 1], [1]))]
    steps = [("step", (True,)), ("step", (False,)), ("sum", ())]
    for program in (batches + steps, shared + steps, [*batches, ("require", (0, "add")), *batches]):
        seen = json.loads(json.dumps(beside.results(kvstore, program)))
        assert seen == beside.of_another_process(kvstore, program)


@pytest.mark.parametrize("call", [on_another_thread, lambda function, *args: function(*args)])
@pytest.mark.parametrize("trainer", [None, "own loop"])
def test_a_step_on_another_network_between_the_passes_of_two_devices(trainer, call):
    """On this thread or another one, which has made a step of this network, too."""

    def step(i, num_passes, between=list):
        losses = []
        for value in nets[i][0].list_data()[:num_passes]:
            with autograd.record():
                losses.append(value * 2)
        losses[0].backward()
        between()
        for loss in losses[1:]:
            loss.backward()
        trainers[i].step(1)

    nets = [runs.weights([[1.0]], 3) for _ in range(2)]
    trainers = [TRAINERS[trainer](params, "sgd", {"learning_rate": 1.0}) for params in nets]
    call(step, 0, 3)
    want = [-5.0, 1.0]
    for i, num_passes, of_other in ((0, 3, 3), (0, 2, 3), (0, 3, 1), (0, 1, 1), (1, 2, 3)):
        step(i, num_passes, lambda i=i, n=of_other: call(step, 1 - i, n))
        want[i] -= 2 * num_passes
        want[1 - i] -= 2 * of_other
        for value, (param,) in zip(want, nets):
            assert [copy.asscalar() for copy in param.list_data()] == [value] * 3


@pytest.mark.parametrize("how", ["a loop of backward", "a loop", "run_tasks"])
@pytest.mark.parametrize("trainer", [None, "own loop"])
def test_two_threads_train_two_networks_at_the_same_time(trainer, how):
    """By graphs that take longer than starting the threads."""

    def train(params):
        def loss(x):
            return sum(params[0].data(x.context) * x for _ in range(200))

        made = TRAINERS[trainer](params, "sgd", {"learning_rate": 1.0})
        shards, ctx = [mx.nd.ones((1,), ctx=c) for c in contexts(2)], contexts(2)
        for _ in range(9):
            if how == "run_tasks":
                with autograd.record():
                    losses = run_tasks(loss, shards, ctx)
                run_tasks(lambda one: one.backward(), losses, ctx)
            else:
                differentiate(loss, shards, how)
            made.step(400)
        return [value.asscalar() for value in params[0].list_data()]

    with ThreadPoolExecutor(2) as threads:
        trained = threads.map(train, [runs.weights([[1.0]], 2), runs.weights([[1.0]], 2)])
        assert [*trained] == [[-8.0, -8.0]] * 2


def test_skip_nonfinite_counts_the_batches_that_are_not_finite_only():
    """The last batch is good; the one before it left NaN on the device that has no sample now."""
    params = runs.weights([[1.0]], 2)
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, skip_nonfinite=True)
    for grads in ([np.nan, np.nan], [3.0]):
        give_grads(params, [grads])
    trainer.step(1)
    assert trainer.num_skipped == 0
    assert [value.asscalar() for value in params[0].list_data()] == [-2, -2]


@pytest.mark.parametrize("num_programs", [NUM_PROGRAMS, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kvstore, optimizer, sparse", any_program.EVERY)
def test_programs_of_any_order_train_as_one(kvstore, optimizer, sparse, num_programs):
    any_program.law(kvstore, optimizer, sparse, num_programs)()


def test_a_graph_with_static_memory_beside_another_after_a_move():
    """It writes to the gradients from before the move, when the other one's have been seen."""
    both, other = [(2, model, "one backward", 1) for model in (0, 2)]
    program = [("hybridize", (STATIC,)), ("backward", both), ("move", (2, False))]
    program += [
        ("train", (0, *other)),
        ("train", (0, *both)),
        ("accumulate", (0, "step", both, other)),
    ]
    any_program.check(None, "sgd", False, 2, program)


@pytest.mark.parametrize("before", [[], [("sum", (0,))]], ids=["", "after a sum that is not used"])
def test_passes_add_to_one_of_the_sums_that_a_program_made(before):
    """grad_req='add' without zero_grad after the step."""
    batch, after = [(0, n, 0, "one backward", n) for n in (4, 3)]
    program = [("require", (1, "add")), *before, ("sum_by_hand", batch), ("train", after)]
    any_program.check(None, "sgd", False, 2, program)


def towers(forward_backward, shards, ctx):
    """A step of Towers on other variables, whose forward is the task."""

    def forward(x, variables):
        with autograd.record():
            forward_backward(x)
        return (x[:, 0] * variables[0]) ** 2

    Towers(forward, [mx.nd.ones((1,))], ctx).step(shards, lr=0.1)


@pytest.mark.parametrize("k, number", [(2, 2), (2, 3), (3, 2)])
def test_passes_of_a_thread_per_device_count_in_whatever_order_the_threads_come(k, number):
    """Of each device the last pass, in every order; also after a batch that was left out."""
    ctx = contexts(k)
    params = [get_params([mx.nd.ones((1,))], c) for c in ctx]

    def backward(i, factor):
        with autograd.record():
            loss = params[i][0] * factor
        loss.backward()

    orders = {*itertools.permutations([i for i in range(k) for _ in range(number)])}
    for order, left_out in itertools.product(sorted(orders), (False, True)):
        if left_out and order[0] == 0:  # where batches begin
            backward(0, 100)
        for n, i in enumerate(order):
            THREADS[i].submit(backward, i, n + 1).result()
        allreduce_grads(params)
        want = sum(max(n for n, i in enumerate(order) if i == device) + 1 for device in range(k))
        assert [w.grad.asscalar() for (w,) in params] == [want] * k, order


def test_gradients_of_tasks_that_failed_do_not_count_in_the_first_sum_by_hand():
    """Not even on the device that computes nothing in the next batch."""
    ctx = contexts(3)
    params = [get_params([mx.nd.ones((1,))], c) for c in ctx]

    def task(i):
        if i == 2:
            raise KeyError
        with autograd.record():
            loss = params[i][0] * 10
        loss.backward()

    with pytest.raises(TaskError):
        run_tasks(task, [0, 1, 2], ctx)
    with autograd.record():
        loss = params[2][0] * 5
    loss.backward()
    allreduce_grads(params)
    assert [w.grad.asscalar() for (w,) in params] == [5.0] * 3


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_copy_that_was_replaced_counts_in_the_first_sum_by_hand(replaced):
    """Of the other copy the passes have been kept, of this one not."""
    ctx = contexts(2)
    params = [get_params([mx.nd.ones((1,))], c) for c in ctx]
    params[replaced][0] = params[replaced][0].copy()
    params[replaced][0].attach_grad()
    with autograd.record():
        losses = [w * factor for (w,), factor in zip(params, (3, 4))]
    autograd.backward(losses)
    allreduce_grads(params)
    assert [w.grad.asscalar() for (w,) in params] == [7.0] * 2


@pytest.mark.parametrize("call", [run_tasks, towers])
def test_gradients_of_a_failed_call_count_in_no_later_step(call):
    """One device has computed gradients of a layer when another fails; the next batch leaves it."""
    params, ctx = runs.weights([[1.0], [2.0]], 2), contexts(2)
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})

    def forward_backward(x):
        if x.context == ctx[-1]:
            raise KeyError
        with autograd.record():
            losses = sum(param.data(x.context) * 100 for param in params)
        losses.backward()

    with pytest.raises((KeyError, RuntimeError)):
        call(forward_backward, split_and_load(mx.nd.ones((4, 3)), ctx), ctx)
    give_grads(params[:1], [[2.0, 3.0]])
    trainer.step(1, ignore_stale_grad=True)
    values = [[value.asscalar() for value in param.list_data()] for param in params]
    assert values == [[-4.0] * 2, [2.0] * 2]
