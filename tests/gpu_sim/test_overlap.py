"""The all-reduce of the first buckets begins while backward still computes the others."""

import pytest

from tests.support import simulated_gpus

# All operators of a step are queued before any can start, so that it does not matter how fast
# Python is: the batch, on the CPU, is written by an operator that waits for that.
# Six layers whose weights fill a bucket each. Only forward and backward call cuBLAS.
PROGRAM = """
import sys, threading
import gluonpar
import mxnet as mx
from cuda_sim import reset, timeline
from gluonpar.runtime import cached_op, engine

WIDTH, LAYERS, BATCH = 1024, 6, 16
ctx = [mx.gpu(0), mx.gpu(1)]


@cached_op.traceable
def mlp(X, params):
    F = cached_op.operators(X)
    for weight in params:
        X = F.Activation(F.FullyConnected(X, weight, num_hidden=WIDTH, no_bias=True), "relu")
    return X


weights = [mx.nd.random.normal(0, 0.05, (WIDTH, WIDTH)) for _ in range(LAYERS)]
replicas = [gluonpar.get_params(weights, c) for c in ctx]
X, y = mx.nd.random.normal(0, 1, (BATCH, WIDTH)), mx.nd.arange(BATCH)
for _ in range(2):  # the first step allocates
    mx.nd.waitall()
    reset()
    queued = threading.Event()
    engine.push(lambda: queued.wait(600), mx.cpu(0), writes=[X])
    gluonpar.train_batch(X, y, replicas, ctx, 0.1, mlp, algorithm=sys.argv[1])
    queued.set()
mx.nd.waitall()
computed = [one for one in timeline() if one.name.startswith("cublas")]
sent = [one for one in timeline() if one.name.startswith(("peer direct", "ncclAllReduce"))]
first = min(sent, key=lambda one: one.begin)
for device in range(2):
    here = [one for one in computed if one.device == device]
    assert max(one.end for one in here) > first.begin, "the exchange waited for all of backward"
    during = [one for one in here if first.begin < one.begin < first.end]
    assert during, "backward waited for the exchange"
assert len(sent) >= 2 * LAYERS, f"{len(sent)} messages for {LAYERS} buckets"
"""


@pytest.mark.parametrize("algorithm", ["star", "balanced", "nccl"])
def test_the_first_bucket_is_exchanged_while_backward_computes_the_others(algorithm):
    """With links on which a bucket takes half a second."""
    simulated_gpus.run(PROGRAM, algorithm, timeline=1, link=8 << 20)
