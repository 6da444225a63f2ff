"""Copies between GPUs, as counters() of the simulated driver counts them."""

import os
import subprocess
import sys

import mxnet as mx
import pytest
from contexts import contexts
from cuda_sim.environment import counters, environment, reset

from gluonpar import allreduce


@pytest.mark.parametrize("algorithm, messages", [("star", 6), ("tree", 6), ("balanced", 24)])
def test_all_copies_between_gpus_are_direct(algorithm, messages):
    data = [mx.nd.ones((4096,), ctx=c) for c in contexts(4)]
    allreduce(data, algorithm)  # enables peer access, and allocates
    mx.nd.waitall()
    reset()
    allreduce(data, algorithm)
    mx.nd.waitall()
    counted = counters()
    direct, staged = (counted.get(f"peer {way}") for way in ("direct", "staged"))
    assert direct.times == messages and (staged is None or staged.times == 0)


LOAD = """
import gluonpar, mxnet as mx, numpy as np
ctx = [mx.gpu(0), mx.gpu(1)]
batches = [gluonpar.split_and_load(np.full((2, 1000), i, "float32"), ctx) for i in range(200)]
print([{number for shard in own for number in shard.asnumpy().flat} for own in batches])
"""


def test_pinned_memory_is_not_filled_again_before_it_is_copied():
    variables = {**os.environ, **environment(2, delays=1)}
    done = subprocess.run([sys.executable, "-c", LOAD], env=variables, stdout=subprocess.PIPE)
    assert done.stdout.decode().strip() == str([{float(i)} for i in range(200)])
