"""Threads that train: what gluonpar starts, and a program's own."""

import threading

import mxnet as mx
import psutil
import pytest
from mxnet import autograd

import gluonpar
from tests.support.contexts import contexts
from tests.support.processes import run_fork

CTX = contexts(3)
BATCHES = 1000
KEPT_MB = 100  # a generator takes 5 MB: one for each batch would be 5,000


def masked(x):
    return mx.nd.Dropout(x, p=0.5, cudnn_off=True)


def in_tasks(shards):
    def task(x):
        with autograd.record():
            return masked(x)

    return gluonpar.run_tasks(task, shards, CTX)


def in_parallel(shards):
    with autograd.record():
        outputs = gluonpar.make_parallel(masked, CTX, x=mx.nd.ones((len(CTX), 64)))
    return list(outputs)


def in_towers(shards, made=[]):  # noqa: B006 - made once
    def forward(x, variables):
        return {"loss": (x * variables[0]).sum(axis=1), "mask": masked(x)}

    made[:] = made or [gluonpar.Towers(forward, [mx.nd.ones((1,))], CTX)]
    return made[0].step(shards, lr=0.1)["mask"]


@pytest.mark.parametrize("way", [in_tasks, in_parallel, in_towers])
def test_masks_of_all_devices_and_batches_differ_follow_the_seed_and_nothing_is_kept(way):
    shards = [mx.nd.ones((1, 64), ctx=c) for c in CTX]

    def masks(seed, num_batches):
        mx.random.seed(seed)
        batches = [way(shards) for _ in range(num_batches)]
        return [mask.asnumpy().tobytes() for batch in batches for mask in batch]

    first = masks(3, 10)
    num_threads, process = threading.active_count(), psutil.Process()
    before = process.memory_info().rss
    all_masks = masks(3, BATCHES)
    assert (process.memory_info().rss - before) / 1e6 < KEPT_MB
    assert threading.active_count() == num_threads
    assert len({*all_masks}) == len(all_masks) == BATCHES * len(CTX)
    assert all_masks[: len(first)] == first
    assert {*masks(4, 10)}.isdisjoint(all_masks)


PROGRAM = """
import threading, warnings
import gluonpar, mxnet as mx
from mxnet import autograd

params = gluonpar.get_params([mx.nd.ones((1,))], mx.cpu(0))

def train(num_batches):
    for _ in range(num_batches):
        with autograd.record():
            loss = params[0] * 2
        loss.backward()

def run(num_threads, num_batches):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_threads):
            thread = threading.Thread(target=train, args=(num_batches,))
            thread.start()
            thread.join()
    return [(each.category.__name__, "run_tasks" in str(each.message)) for each in caught]

print(run(2, 40), run(40, 1), run(40, 1))
"""


def test_a_program_whose_threads_end_is_warned_once_and_others_are_not():
    assert run_fork(PROGRAM) == "[] [('RuntimeWarning', True)] []\n"
