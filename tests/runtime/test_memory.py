"""The memory of a process: what is freed is returned, its peak is constant, workspaces differ."""

import pytest
from processes import run_python

from gluonpar.install import compatibility

RETURNS = """
import gluonpar
import mxnet as mx
from mxnet import autograd, gluon

CTX, BATCH, MB = [mx.cpu(0), mx.cpu(1)], mx.nd.ones((4, 3)), 1 << 20
params = [gluonpar.get_params([mx.nd.ones((3, 1))], c) for c in CTX]


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / MB


def train_batch():
    model = lambda X, params: mx.nd.dot(X, params[0])
    gluonpar.train_batch(BATCH, mx.nd.ones((4, 1)), params, CTX, 0.1, model, lambda a, b: a - b)


def gluon_step(made, **options):
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize(ctx=CTX)
    trainer = made(net.collect_params(), "sgd", {"learning_rate": 0.1}, **options)

    def step():
        with autograd.record():
            losses = [net(shard) for shard in gluon.utils.split_and_load(BATCH, CTX)]
        autograd.backward(losses)
        trainer.step(4)

    return step


trainer, kvstore = gluon_step(gluonpar.Trainer), gluon_step(gluon.Trainer, kvstore="gluonpar")
for step in (train_batch, trainer, trainer, kvstore):  # the steps 1 to 4 of the process
    arrays = [mx.nd.ones((MB // 4,)) for _ in range(200)]  # 1 MB each
    mx.nd.waitall()
    del arrays[::2], arrays[::2]  # what is left keeps glibc from returning whole heaps
    before = resident()
    step()
    mx.nd.waitall()
    print(before - resident(), flush=True)
"""


def test_freed_memory_is_returned_after_steps_1_2_and_4_whatever_trains():
    returned = [float(megabytes) for megabytes in run_python(RETURNS).split()]
    first, second, third, fourth = returned
    assert min(first, second, fourth) > 100, returned
    assert abs(third) < 50, returned  # kept: most steps use again what the one before has freed


# Each program runs in a process of its own, with few and with many times the work. An accuracy that
# queues all batches took at least 100 MB more, and so did networks that are kept.
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


# On context 0 a function waits for `seconds`, then 100 sums for it; then there is one on context 1.
PROGRAM = """
import sys, threading
{first}
import gluonpar
import mxnet as mx
from gluonpar.runtime import engine

def sum_comes_in_time(seconds):
    held, in_time = threading.Event(), []
    x, y = (mx.nd.ones((8,), ctx=mx.cpu(i)) for i in range(2))
    mx.nd.waitall()
    engine.push(lambda: in_time.append(held.wait(seconds)), mx.cpu(0), writes=[x])
    for _ in range(100):
        mx.nd.sum(x)
    total = mx.nd.sum(y)
    engine.push(held.set, mx.cpu(1), writes=[total])
    mx.nd.waitall()
    return in_time == [True]

def give_contexts():
    gluonpar.split_and_load(mx.nd.ones((2, 1)), [mx.cpu(0), mx.cpu(1)])
{then}
"""
BOTH = """
before = sum_comes_in_time(0.2)
give_contexts()
print(before, sum_comes_in_time(60))
"""
ON_A_THREAD = """
give_contexts()
printed = []
def work():
    mx.random.uniform(shape=(3,)).wait_to_read()
    give_contexts()
    printed.append(sum_comes_in_time(60))
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(*printed)
"""
# gluonpar's module that lets MXNet be imported, without the rest of gluonpar.
LATE = f"import runpy; runpy.run_path({compatibility.__file__!r})['install']()\n"
LATE += "import mxnet; mxnet.random.uniform(shape=(3,)).asnumpy()"
READ = "import ctypes; print(ctypes.CDLL(None).getenv(b'MXNET_CPU_TEMP_COPY') or None)"
FEW = {"MXNET_CPU_TEMP_COPY": "7"}


@pytest.mark.parametrize(
    ("first", "then", "variables", "printed"),
    [
        ("", BOTH, {}, "False True"),
        (LATE, BOTH, {}, "False True"),
        ("", ON_A_THREAD, {}, "True"),
        ("", BOTH.replace("60", "0.2"), FEW, "False False"),
        ("", BOTH + READ, {}, "None"),
    ],
    ids=["import", "after operators", "another thread", "set by the user", "environment"],
)
def test_contexts_share_workspaces_until_gluonpar_is_given_several(first, then, variables, printed):
    done = run_python(PROGRAM.format(first=first, then=then), **variables)
    assert done.splitlines()[-1] == printed
