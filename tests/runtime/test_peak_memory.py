"""The peak of memory does not grow with what a program computes one after the other.

Each program runs in a process of its own, with few and with many times the work. An
accuracy that queues all batches took at least 100 MB more, and so did networks that are kept.
"""

import pytest
from processes import run_python

MARGIN = 40  # MB; two processes that do the same differ by up to 10

EVALUATION = """
import numpy as np
from gluonpar import metrics

model = gluonpar.lenet
params = [gluonpar.get_params(gluonpar.init_lenet(), c) for c in ctx]
images = np.broadcast_to(np.float32(0.5), (256 * work, 1, 28, 28))
metrics.accuracy(images, np.zeros(256 * work), params, ctx, model)
"""

STEPS = """
def model(X, params):
    return mx.nd.dot(X.reshape((0, -1)), params[0])

params = [gluonpar.get_params([mx.nd.ones((784, 10))], c) for c in ctx]
X, y = mx.nd.ones((256, 784)), mx.nd.zeros((256,))
for _ in range(work):
    losses = gluonpar.train_batch(X, y, params, ctx, 1e-3, model=model)
    losses[0].wait_to_read()
"""

NETWORKS = """
for _ in range(work):
    net = gluon.nn.Dense(1024, in_units=1024)
    net.initialize(ctx=ctx)
    trainer = gluonpar.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})
    for _ in range(2):
        with autograd.record():
            losses = [net(mx.nd.ones((1, 1024), ctx=c)) for c in ctx]
        autograd.backward(losses)
        trainer.step(2)
    mx.nd.waitall()
    gc.collect()  # a Gluon network, and a Trainer with it, is in a cycle of references
"""

BEFORE = """
import gc, resource, sys
import gluonpar
import mxnet as mx
from mxnet import autograd, gluon
ctx, work = [mx.cpu(0), mx.cpu(1)], int(sys.argv[1])
"""
AFTER = "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)"


@pytest.mark.parametrize(
    ("program", "little", "much"),
    [(EVALUATION, 8, 32), (STEPS, 300, 1200), (NETWORKS, 4, 16)],
    ids=["images evaluated", "steps trained", "networks dropped"],
)
def test_the_peak_does_not_grow_with(program, little, much):
    low, high = (int(run_python(BEFORE + program + AFTER, str(n))) for n in (little, much))
    assert high < low + MARGIN, (low, high)
