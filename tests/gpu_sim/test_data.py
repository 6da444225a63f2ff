"""Batches go to GPUs through pinned memory, without waiting."""

import threading
import time

import mxnet as mx
import numpy as np
from cuda_sim import counters, reset

import gluonpar
from gluonpar.runtime import engine
from tests.support import simulated_gpus
from tests.support.contexts import contexts


def test_the_next_batch_is_copied_while_the_gpus_compute_this_one():
    ctx, copies = contexts(2), 2 * 2 * 2
    params = [gluonpar.get_params(gluonpar.init_lenet(), c) for c in ctx]
    X, y = np.zeros((4, 1, 28, 28), "float32"), np.zeros(4, "int32")
    gluonpar.train_batch(X, y, params, ctx, 0.1)
    mx.nd.waitall()
    reset()
    go_on = threading.Event()
    engine.push(lambda: go_on.wait(600), mx.cpu(1), writes=[p[0] for p in params])
    for _ in range(2):
        gluonpar.train_batch(X, y, params, ctx, 0.1)
    end = time.monotonic() + 300  # only if they are not copied
    while counters().get("H2D pinned", (0,))[0] < copies and time.monotonic() < end:
        time.sleep(0.001)
    counted = counters()
    go_on.set()
    mx.nd.waitall()
    assert counted["H2D pinned"].times == copies
    assert not any(name.startswith("cudnn") for name in counted)  # no GPU could compute


LOAD = """
import gluonpar, mxnet as mx, numpy as np
ctx = [mx.gpu(0), mx.gpu(1)]
batches = [gluonpar.split_and_load(np.full((2, 1000), i, "float32"), ctx) for i in range(200)]
print([{number for shard in shards for number in shard.asnumpy().flat} for shards in batches])
"""


def test_pinned_memory_is_not_filled_again_before_it_is_copied():
    printed = simulated_gpus.run(LOAD, delays=1)
    assert printed.strip() == str([{float(i)} for i in range(200)])
