"""A process that is interrupted again and again while it computes; prints what came of it.

python interrupted.py WORK NUMBER
"""

import os
import random
import signal
import sys
import threading
import time

import numpy as np

import gluonpar

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip

DEVICES = [mx.cpu(0), mx.cpu(1)]
ROWS = np.ones((8, 1, 28, 28), "float32"), np.arange(8, dtype="float32") % 10


def allreduce(algorithm=None):
    data = [mx.nd.ones((1000,), ctx=c) for c in DEVICES]
    return lambda: gluonpar.allreduce(data, algorithm, op="mean"), lambda: [data]


def hops():
    return allreduce("ring")


def train_batch():
    params = [gluonpar.get_params(gluonpar.init_lenet(0.05), c) for c in DEVICES]
    return lambda: gluonpar.train_batch(*ROWS, params, DEVICES, 0.01), lambda: list(zip(*params))


def gluon_loop(make_trainer, norm=None):
    """With a layer ``norm`` the devices' passes run on threads of their own."""
    net, loss = gluon.nn.HybridSequential(), gluon.loss.SoftmaxCELoss()
    net.add(*([gluon.nn.Conv2D(2, 3), norm] if norm else []), gluon.nn.Dense(10))
    net.initialize(ctx=DEVICES)
    net.hybridize()
    for c in DEVICES:
        net(mx.nd.array(ROWS[0][:1], ctx=c))
    trainer = make_trainer(net.collect_params(), "adam", {"learning_rate": 1e-4})

    def forward_backward(shard):
        X, y = shard
        with autograd.record():
            losses = loss(net(X), y)
        losses.backward()

    def step():
        shards = gluonpar.split_and_load(ROWS, DEVICES)
        if norm:
            gluonpar.run_tasks(forward_backward, shards, DEVICES)
        else:
            [forward_backward(shard) for shard in shards]
        trainer.step(8, ignore_stale_grad=True)

    # MXNet's own Trainer updates device after device, and Ctrl-C may come between two of them.
    own = isinstance(trainer, gluonpar.Trainer)
    return step, lambda: [p.list_data() for p in net.collect_params().values()] if own else []


def trainer():
    return gluon_loop(gluonpar.Trainer)


def kvstore():
    def stock(*arguments):
        return gluon.Trainer(*arguments, kvstore="gluonpar")

    return gluon_loop(stock)


def sync_batch_norm():
    return gluon_loop(gluonpar.Trainer, gluonpar.SyncBatchNorm(timeout_seconds=600))


def data():
    images = np.arange(64 * 784, dtype="uint8").reshape(64, 1, 28, 28)
    last = []

    def step():
        last[:] = gluonpar.split_and_load(images, DEVICES)

    def copies():
        shards = np.concatenate([shard.asnumpy() for shard in last])
        assert (shards == images).all()
        return []

    return step, copies


class Main:
    """What the main thread has done."""

    steps = interrupts = 0


def interrupt():
    """Send SIGINT at random moments within steps; the next one after the first has had its effect.

    Python drops the exception if it is raised in a destructor; then the steps go on.
    """
    while True:
        steps = Main.steps
        while Main.steps == steps:
            time.sleep(1e-3)
        time.sleep(random.expovariate(500))
        steps, interrupts = Main.steps, Main.interrupts
        os.kill(os.getpid(), signal.SIGINT)
        while Main.interrupts == interrupts and Main.steps <= steps + 9:
            time.sleep(1e-3)


def main(work, number):
    step, copies = globals()[work]()
    for _ in range(3):
        step()
    mx.nd.waitall()
    threading.Thread(target=interrupt, daemon=True).start()
    while Main.interrupts < number:
        try:
            while True:
                step()
                Main.steps += 1
                if Main.steps % 20 == 0:
                    mx.nd.waitall()
        except KeyboardInterrupt:
            Main.interrupts += 1
            # MXNet's own scope of autograd.record() is not left if the interrupt comes in its exit.
            autograd.set_recording(False)
            autograd.set_training(False)
    mx.nd.waitall()
    alike = all(len({a.asnumpy().tobytes() for a in arrays}) == 1 for arrays in copies())
    step()
    mx.nd.waitall()
    print(f"{work}: {number} interrupts, {Main.steps} steps, alike: {alike}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
