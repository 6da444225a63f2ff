"""Batches go to GPUs through pinned memory, without waiting."""

import os
import subprocess
import sys
import threading
import time

import mxnet as mx
import numpy as np
from contexts import contexts, device
from cuda_sim.environment import counters, environment, reset

import gluonpar
from gluonpar.runtime import engine, memory


def test_the_next_batch_is_copied_while_the_gpus_compute_this_one():
    ctx, copies = contexts(2), 2 * 2 * 2
    params = [gluonpar.get_params(gluonpar.init_lenet(), c) for c in ctx]
    X, y = np.zeros((4, 1, 28, 28), "float32"), np.zeros(4, "int32")
    gluonpar.train_batch(X, y, params, ctx, 0.1)
    mx.nd.waitall()
    reset()
    go_on = threading.Event()
    engine.push(lambda: go_on.wait(60), mx.cpu(1), writes=[p[0] for p in params])
    for _ in range(2):
        gluonpar.train_batch(X, y, params, ctx, 0.1)
    end = time.monotonic() + 30  # only if they are not copied
    while counters().get("H2D pinned", (0,))[0] < copies and time.monotonic() < end:
        time.sleep(0.001)
    counted = counters()
    go_on.set()
    mx.nd.waitall()
    assert counted["H2D pinned"].times == copies
    assert not any(name.startswith("cudnn") for name in counted)  # no GPU could compute


MANY_BATCHES = """
import gluonpar
import mxnet as mx
import numpy as np
from gluonpar.runtime import memory

arrays = [memory.from_numpy(np.full(1 << 18, i, "float32"), mx.gpu(i % 2)) for i in range(60)]
for i, array in enumerate(arrays):
    assert (array == i).asnumpy().all(), f"array {i} has another one's values"
"""


def test_pinned_memory_is_used_again_only_when_its_copy_has_ended():
    """60 copies, each of which begins after a random delay, from 4 buffers per GPU."""
    simulated = {**environment(2, delays=1), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", MANY_BATCHES],
        env={**os.environ, **simulated},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def test_the_host_cannot_view_memory_of_a_gpu():
    for read in (memory.view, lambda array: memory.views([array])):
        try:
            read(mx.nd.ones((2,), ctx=device(0)))
        except ValueError as error:
            assert "gpu(0)" in str(error)
        else:
            raise AssertionError("a view of a GPU's memory")
