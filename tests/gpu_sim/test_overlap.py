"""The all-reduce of the first buckets begins while backward still computes the others."""

import pytest
import simulated_gpus

# All operators of a step are queued before any can start, so that it does not matter how fast
# Python is: the batch, on the CPU, is written by an operator that waits for that.
START = """
import sys, threading
import gluonpar
import mxnet as mx
from cuda_sim import reset, timeline
from gluonpar.runtime import cached_op, engine

ctx, algorithm = [mx.gpu(0), mx.gpu(1)], sys.argv[1] if sys.argv[1:] else None


def record(step, X, y):
    for _ in range(2):  # the first step allocates
        mx.nd.waitall()
        reset()
        queued = threading.Event()
        engine.push(lambda: queued.wait(600), mx.cpu(0), writes=[X])
        step(X, y)
        queued.set()
    mx.nd.waitall()
    return timeline()


def named(operations, *names):
    return [one for one in operations if one.name.startswith(names)]
"""

# Six layers whose weights fill a bucket each. Only forward and backward call cuBLAS.
PERCEPTRON = """
WIDTH, LAYERS, BATCH = 1024, 6, 16


@cached_op.traceable
def mlp(X, params):
    F = cached_op.operators(X)
    for weight in params:
        X = F.Activation(F.FullyConnected(X, weight, num_hidden=WIDTH, no_bias=True), "relu")
    return X


weights = [mx.nd.random.normal(0, 0.05, (WIDTH, WIDTH)) for _ in range(LAYERS)]
replicas = [gluonpar.get_params(weights, c) for c in ctx]
done = record(
    lambda X, y: gluonpar.train_batch(X, y, replicas, ctx, 0.1, mlp, algorithm=algorithm),
    mx.nd.random.normal(0, 1, (BATCH, WIDTH)),
    mx.nd.arange(BATCH),
)
computed, sent = named(done, "cublas"), named(done, "peer direct", "ncclAllReduce")
first = min(sent, key=lambda one: one.begin)
for device in range(2):
    here = [one for one in computed if one.device == device]
    assert max(one.end for one in here) > first.begin, "the exchange waited for all of backward"
    during = [one for one in here if first.begin < one.begin < first.end]
    assert during, "backward waited for the exchange"
assert len(sent) >= 2 * LAYERS, f"{len(sent)} messages for {LAYERS} buckets"
"""


def run(program, *arguments):
    """Run it with links on which a bucket takes a second."""
    simulated_gpus.run(START + program, *arguments, timeline=1, link=4 << 20)


@pytest.mark.parametrize("algorithm", ["star", "balanced", "nccl"])
def test_the_first_bucket_is_exchanged_while_backward_computes_the_others(algorithm):
    run(PERCEPTRON, algorithm)
