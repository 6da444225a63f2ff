"""The memory of a process: what is freed is returned, its peak is constant, workspaces differ."""

import pytest

from gluonpar.install import compatibility
from tests.support.processes import end_python, run_fork

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


def gluon_step():
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize(ctx=CTX)
    trainer = gluonpar.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

    def step():
        with autograd.record():
            losses = [net(shard) for shard in gluon.utils.split_and_load(BATCH, CTX)]
        autograd.backward(losses)
        trainer.step(4)

    return step


trainer, other = gluon_step(), gluon_step()
for step in (train_batch, trainer, trainer, other):  # the steps 1 to 4 of the process
    arrays = [mx.nd.ones((MB // 4,)) for _ in range(200)]  # 1 MB each
    mx.nd.waitall()
    del arrays[::2], arrays[::2]  # what is left keeps glibc from returning whole heaps
    before = resident()
    step()
    mx.nd.waitall()
    print(before - resident(), flush=True)
"""


def test_freed_memory_is_returned_after_steps_1_2_and_4_whatever_trains():
    returned = [float(megabytes) for megabytes in run_fork(RETURNS).split()]
    first, second, third, fourth = returned
    assert min(first, second, fourth) > 100, returned
    assert abs(third) < 50, returned  # kept: most steps use again what the one before has freed


# Each program prints the peak after little work and after much, in one process. An accuracy that
# queues all batches takes gigabytes more, and networks that are kept take 100 MB.

EVALUATION = """
import numpy as np
from gluonpar import metrics

model = gluonpar.lenet
params = [gluonpar.get_params(gluonpar.init_lenet(), c) for c in ctx]
for work in (16, 48):
    images = np.broadcast_to(np.float32(0.5), (256 * work, 1, 28, 28))
    metrics.accuracy(images, np.zeros(256 * work), params, ctx, model)
    print(peak())
"""

NETWORKS = """
for number in range(20):
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
    if number in (3, 19):
        print(peak())
"""

BEFORE = """
import gc, resource
import gluonpar
import mxnet as mx
from mxnet import autograd, gluon
ctx = [mx.cpu(0), mx.cpu(1)]
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
"""


@pytest.mark.parametrize(
    ("program", "margin"),  # MB; of images a batch more may be in flight, which takes 90
    [(EVALUATION, 150), (NETWORKS, 40)],
    ids=["images evaluated", "networks dropped"],
)
def test_the_peak_does_not_grow_with(program, margin):
    low, high = map(int, run_fork(BEFORE + program).split())
    assert high < low + margin, (low, high)


COPIES = """
def make(uses):
    copies = [gluonpar.get_params([mx.nd.ones((1000,))], c) for c in ctx]
    if uses:
        with autograd.record():
            losses = [(w * 2).sum() for (w,) in copies]
        autograd.backward(losses)
    if uses == 2:
        gluonpar.allreduce_grads(copies)


for _ in range(2):
    for i in range(600):
        make(i % 3)
    gc.collect()
    print(sum(type(each) in (mx.nd.NDArray, mx.sym.Symbol) for each in gc.get_objects()))
"""


def test_nothing_is_kept_of_copies_of_parameters_that_are_dropped():
    """Whether they were used, or summed, or neither."""
    before, after = map(int, run_fork(BEFORE + COPIES).split())
    assert after - before < 20  # arrays, and variables of the tape, of 1,200 copies


# Operators on the weights of this layer have workspaces of several MB.
LARGE_WORKSPACES = """
from gluonpar import metrics

X, y = mx.nd.ones((4, 256, 4, 4)), mx.nd.ones((4,))
net = gluon.nn.Conv2D(256, 3, in_channels=256)
net.initialize(ctx=ctx)
net.hybridize()
values = [p.data(ctx[0]) for p in net.collect_params().values()]
own = [gluonpar.get_params(values, c) for c in ctx]
trainer = gluonpar.Trainer(net.collect_params(), "sgd")
kv = mx.kv.create("gluonpar")


def model(X, params):
    return mx.nd.Convolution(X, *params, kernel=(3, 3), num_filter=256).mean(axis=(2, 3))


def backward():
    with autograd.record():
        losses = [net(x) for x in gluonpar.split_and_load(X, ctx)]
    autograd.backward(losses)


def task(x):
    with autograd.record():
        loss = net(x)
    loss.backward()


def train_batch():
    gluonpar.train_batch(X, y, own, ctx, 0.1, model)


def gluon_step():
    backward()
    trainer.step(4)


def pushpull():
    backward()
    kv.pushpull(0, net.weight.list_grad())


def allreduce_grads():
    backward()
    gluonpar.allreduce_grads([[p.data(c) for p in (net.weight, net.bias)] for c in ctx])


def accuracy():
    metrics.accuracy(X, y, ctx, ctx, lambda X, _: net(X).mean(axis=(2, 3)))


def run_tasks():
    gluonpar.run_tasks(task, gluonpar.split_and_load(X, ctx), ctx)
    trainer.step(4)


def addresses(calls, function):
    for _ in range(calls):
        function()
        mx.nd.waitall()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) >> 8
"""
GROWTH = """
for step in (train_batch, gluon_step, pushpull, allreduce_grads, accuracy, run_tasks):
    before = addresses(4, step)
    print(step.__name__, addresses(60, step) - before)
"""


def test_each_step_has_the_workspaces_of_the_step_before():
    lines = run_fork(BEFORE + LARGE_WORKSPACES + GROWTH).splitlines()
    growth = {name: int(megabytes) for name, megabytes in map(str.split, lines)}
    assert len(growth) == 6
    assert max(growth.values()) < 200, growth  # with others in each step 400 to 1,300


GRAPHS = """
net = gluon.nn.HybridSequential()
for _ in range(75):
    net.add(gluon.nn.Dense(1, in_units=1))
net.initialize()
for _ in range(2):
    for _ in range(60):
        net.hybridize(static_alloc=True, static_shape=True)
        net(mx.nd.ones((1, 1))).wait_to_read()
    gc.collect()
    print(resident())
"""
RESIDENT = """
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4
"""


def test_nothing_is_kept_of_a_networks_graphs_that_are_made_again():
    """Text of a graph, which MXNet's tojson() would keep, is 50 KB in this network."""
    before, after = map(int, run_fork(BEFORE + RESIDENT + GRAPHS).split())
    assert after - before < 1_200  # KB, of 60 graphs


# On context 0 a function waits, and 100 sums wait for it; then there is a sum on context 1. What is
# ready there runs in the order of pushing, so after two more functions the sum has been computed,
# unless it waits for a workspace.
PROGRAM = """
import sys, threading
{first}
import gluonpar
import mxnet as mx
from gluonpar.runtime import engine

def sums_are_apart():
    go_on, ran, done = threading.Event(), threading.Event(), []
    x, y, after = (mx.nd.ones((8,), ctx=mx.cpu(i)) for i in (0, 1, 1))
    mx.nd.waitall()
    engine.push(go_on.wait, mx.cpu(0), writes=[x])
    for _ in range(100):
        mx.nd.sum(x)
    engine.push(lambda: done.append(True), mx.cpu(1), writes=[mx.nd.sum(y)])
    for function in (lambda: None, ran.set):
        engine.push(function, mx.cpu(1), writes=[after])
    ran.wait()  # wait_to_read() would wait on context 0
    apart = bool(done)
    go_on.set()
    mx.nd.waitall()
    return apart

def give_contexts():
    data = [mx.nd.ones((1,), ctx=mx.cpu(i)) for i in range(2)]
    gluonpar.allreduce(data)
    assert data[1].asscalar() == 2
{then}
"""
BOTH = "print(sums_are_apart(), give_contexts() or sums_are_apart())\n"
ON_A_THREAD = """
give_contexts()
def work():
    mx.random.uniform(shape=(3,)).wait_to_read()
    give_contexts()
    print(sums_are_apart())
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
# gluonpar's module that lets MXNet be imported, without the rest of gluonpar.
LATE = f"import runpy; runpy.run_path({compatibility.__file__!r})['install']()\n"
LATE += "import mxnet; mxnet.random.uniform(shape=(3,)).asnumpy()"
READ = "import ctypes; print(ctypes.CDLL(None).getenv(b'MXNET_CPU_TEMP_COPY') or None)"


@pytest.mark.parametrize(
    ("first", "then", "variables", "printed"),
    [
        ("", BOTH + READ, {}, "False True\nNone\n"),
        (LATE, BOTH, {"GOMP_SPINCOUNT": None}, "False True\n"),
        ("", ON_A_THREAD, {}, "True\n"),
        ("", BOTH, {"MXNET_CPU_TEMP_COPY": "7"}, "False False\n"),
    ],
    ids=["import", "after operators", "another thread", "set by the user"],
)
def test_contexts_share_workspaces_until_gluonpar_is_given_several(first, then, variables, printed):
    done = end_python(PROGRAM.format(first=first, then=then), **variables)
    assert (done.stdout, done.stderr) == (printed, "")
