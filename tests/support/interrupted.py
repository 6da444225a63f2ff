"""A process that gets signals again and again while it computes; prints what came of it.

python interrupted.py WORK NUMBER: handlers raise, the step is left out, and the next one begins.
python interrupted.py WORK NUMBER exits: in NUMBER forks, the handler calls sys.exit(0).
"""

import faulthandler
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time

import numpy as np

import gluonpar

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip

DEVICES = [mx.cpu(0), mx.cpu(1)]
ROWS = np.ones((8, 1, 28, 28), "float32"), np.arange(8, dtype="float32") % 10
ROWS[0][:] += np.random.RandomState(0).normal(size=ROWS[0].shape)
LR = 0.01


class Allreduce:
    """Each work has a ``step``, and ``arrays``: the copies of each parameter that it changes."""

    algorithm = None

    def __init__(self, ctx):
        self.arrays = [[mx.nd.ones((1000,), ctx=c) for c in ctx]]

    def step(self):
        gluonpar.allreduce(self.arrays[0], self.algorithm, op="mean")


class Hops(Allreduce):
    algorithm = "ring"


class TrainBatch:
    def __init__(self, ctx):
        self.ctx = ctx
        self.params = [gluonpar.get_params(gluonpar.init_lenet(0.05), c) for c in ctx]
        self.arrays = [*zip(*self.params)]

    def step(self):
        gluonpar.train_batch(*ROWS, self.params, self.ctx, LR)


class Trainer:
    make, norm = gluonpar.Trainer, None

    def __init__(self, ctx):
        self.ctx, self.net, self.loss = ctx, gluon.nn.HybridSequential(), gluon.loss.L2Loss()
        norm = [type(self).norm()] if self.norm and len(ctx) > 1 else []
        norm = [gluon.nn.BatchNorm()] if self.norm and not norm else norm
        self.net.add(gluon.nn.Conv2D(2, 3), *norm, gluon.nn.Dense(1))
        self.net.initialize(ctx=ctx)
        self.net.hybridize()
        for c in ctx:
            self.net(mx.nd.array(ROWS[0][:1], ctx=c))
        make = type(self).make if len(ctx) > 1 else gluon.Trainer  # alone, it is MXNet's
        self.trainer = make(self.net.collect_params(), "sgd", {"learning_rate": LR})
        params = self.net.collect_params().values()
        self.arrays = [p.list_data() for p in params if p.grad_req != "null"]

    def forward_backward(self, shard):
        X, y = shard
        with autograd.record():
            losses = self.loss(self.net(X), y)
        losses.backward()

    def step(self):
        shards = gluonpar.split_and_load(ROWS, self.ctx)
        if self.norm and len(self.ctx) > 1:
            gluonpar.run_tasks(self.forward_backward, shards, self.ctx)
        else:
            [self.forward_backward(shard) for shard in shards]
        self.trainer.step(8, ignore_stale_grad=True)


class RunTasks(Trainer):
    def norm():
        return gluonpar.SyncBatchNorm(timeout_seconds=600)


class Data:
    def __init__(self, ctx):
        self.ctx, self.arrays, self.images = ctx, [], np.arange(64 * 784, dtype="uint8")
        self.last = []

    def step(self):
        self.last[:] = gluonpar.split_and_load(self.images, self.ctx)


WORK = {kind.__name__: kind for kind in (Allreduce, Hops, TrainBatch, Trainer, RunTasks)}
WORK["Data"] = Data


# What MXNet prints if the handler raises before an array that is being made has its handle.
MADE_BY_HALF = re.compile(r"NDArrayBase.__del__.*AttributeError: .*\bhandle\b", re.S)


class Main:
    """What the main thread has done."""

    steps = signals = calls = 0
    is_done = False  # then handlers raise no more


def limit(number, _):
    Main.calls += 1
    if not Main.is_done:
        raise KeyboardInterrupt if number == signal.SIGINT else TimeoutError


def send_signals():
    """At random moments within steps; the next one after the first one's handler was called."""
    while not Main.is_done:
        steps = Main.steps
        while Main.steps == steps and not Main.is_done:
            time.sleep(1e-3)
        time.sleep(random.expovariate(500))
        calls = Main.calls
        os.kill(os.getpid(), random.choice((signal.SIGINT, signal.SIGALRM)))
        while Main.calls == calls and not Main.is_done:
            time.sleep(1e-3)


def goes_on(work, kind):
    """Whether it now trains as one device does that was never interrupted."""
    alone, rng = kind(DEVICES[:1]), np.random.RandomState(1)
    for copies, (one,) in zip(work.arrays, alone.arrays):
        value = mx.nd.array(rng.normal(0, 0.1, one.shape))
        for array in (*copies, one):
            array[:] = value.as_in_context(array.context)
    for _ in range(3):
        work.step()
        alone.step()
    return all(
        np.allclose(array.asnumpy(), one.asnumpy(), 1e-3, 1e-5)
        for copies, (one,) in zip(work.arrays, alone.arrays)
        for array in copies
    )


def main(name, number):
    kind = WORK[name]
    work = kind(DEVICES)
    signal.signal(signal.SIGALRM, limit)
    signal.signal(signal.SIGINT, limit)
    for _ in range(3):
        work.step()
    mx.nd.waitall()
    sender = threading.Thread(target=send_signals, daemon=True)
    sender.start()
    while not Main.is_done:
        try:
            while True:
                work.step()
                Main.steps += 1
                if Main.steps % 20 == 0:
                    mx.nd.waitall()
        except (KeyboardInterrupt, TimeoutError):
            Main.signals += 1
            Main.is_done = Main.signals == number
    sender.join()  # if a handler raised in it, Python 3.8 might wait for ever
    mx.nd.waitall()
    alike = all(len({a.asnumpy().tobytes() for a in copies}) == 1 for copies in work.arrays)
    print(f"{name}: {number} signals, alike: {alike}, goes on: {goes_on(work, kind)}", flush=True)


def exits(name, number):
    """Print how many forks ended with another code than 0, or printed something."""
    work, wrong = WORK[name](DEVICES), 0
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))
    for _ in range(3):
        work.step()
    for _ in range(number):
        with tempfile.TemporaryFile() as printed:
            child = os.fork()
            if not child:
                os.dup2(printed.fileno(), 2)
                faulthandler.dump_traceback_later(30, exit=True)
                signal.setitimer(signal.ITIMER_REAL, 0.005 + random.expovariate(200))
                while True:
                    work.step()
            _, status = os.waitpid(child, 0)
            printed.seek(0)
            text = printed.read().decode()
            if status or text and not MADE_BY_HALF.search(text):
                wrong += 1
                print(f"wait status {status}", text, file=sys.stderr)
    print(f"{name}: {number} exits, wrong: {wrong}", flush=True)


if __name__ == "__main__":
    (exits if sys.argv[3:] == ["exits"] else main)(sys.argv[1], int(sys.argv[2]))
