"""A rank of a job that ends, or one that is told why not.

python -m tests.support.ranks.failures TASK FOLDER, or FAULT RANK
"""

import atexit
import ctypes
import importlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

import gluonpar
from gluonpar import cluster
from gluonpar.cluster import mpi_sums, world

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip
from tests.support import gluon_runs as runs  # isort: skip


def late(folder):
    """Rank 1 comes late to a collective, when there is a file ``go``; the others wait for it."""
    cluster.gather("the first takes longer")
    print(f"rank {cluster.rank()} (pid {os.getpid()}", flush=True)
    while cluster.rank() == 1 and not pathlib.Path(folder, "go").exists():
        time.sleep(0.01)
    cluster.gather(None)


def children():
    """A rank starts a program, before it joins the job, and forks; then it finalizes MPI."""
    program = "from gluonpar import cluster; print('started', cluster.rank(), cluster.size())"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
    before, x = (cluster.rank(), cluster.size()), mx.nd.ones((2,))
    for code in (1, 7):
        child = os.fork()
        if not child:
            signal.alarm(60)
            assert (cluster.rank(), cluster.size()) == before
            for name in ("allreduce", "broadcast", "gather", "abort"):
                with pytest.raises(RuntimeError, match=str(os.getpid())):
                    getattr(cluster, name)([x])
            if code == 1:
                raise KeyError("the cat")
            sys.exit(code)  # through what is done at the end of a process
        assert os.waitpid(child, 0)[1] == code << 8
    cluster.allreduce([x])
    mpi = importlib.import_module("mpi4py.MPI")
    mpi.Finalize()  # without waiting for the sum
    with pytest.raises(RuntimeError, match=r"MPI.Finalize\(\)"):
        cluster.gather(x)
    print(f"rank {before[0]} {x.asnumpy().tolist()}", flush=True)


def saves_alone(folder):
    """Rank 0 alone saves a network, without and with running statistics."""
    for layer in (gluon.nn.Dense(1, in_units=1), gluon.nn.BatchNorm(in_channels=1)):
        layer.initialize()
        if cluster.is_main():
            gluonpar.save_checkpoint(pathlib.Path(folder) / type(layer).__name__, layer)


def first_step_without_samples():
    """Rank 1 has none, and so does not know the shapes of the parameters."""
    net = gluon.nn.Dense(1)
    net.initialize()
    trainer = gluonpar.Trainer(net.collect_params(), "sgd")
    if cluster.is_main():
        with autograd.record():
            loss = net(mx.nd.ones((1, 1)))
        loss.backward()
    trainer.step(1)
    mx.nd.waitall()


def unlike_last_step():
    """Nothing is called after it."""
    params = runs.weights([[0.0]], 1)
    trainer = gluonpar.Trainer(params, "sgd", {"learning_rate": 0.5 + cluster.rank()})
    runs.give_grads(params, [[1.0]])
    trainer.step(cluster.size())


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_alone():
    """Stop when mpirun has just ended; Linux would wake a process that had stopped before."""
    parent = os.getppid()
    while os.getppid() == parent:
        pass
    stop()


FAULTS = {
    "raise": lambda: {}["the cat"],
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
    "stop": stop,
    "stop alone": stop_alone,
    "stop, slowly ended": stop,
    "stop inside": lambda: setattr(mpi_sums, "allreduce", lambda *_, **__: stop()),
    "hang": lambda: time.sleep(1000),
    "leave": lambda: sys.exit(0),
    "leave and hang": lambda: sys.exit(0),
    "go on": lambda: None,
    "stop at the end": stop,
    "fail at the end": lambda: setattr(world.world().messages, "close", lambda _: {}["the cat"]),
    "end last": lambda: (time.sleep(15), print("the last", flush=True)),
}
AT_THE_END = ("stop at the end", "fail at the end", "end last")


class SlowMpi:
    """Abort takes longer than GLUONPAR_TIMEOUT in the tests, as with a launcher that is slow."""

    def __init__(self, mpi):
        self.COMM_WORLD, self.Status, self.mpi = self, mpi.Status, mpi

    def Abort(self, code):
        time.sleep(8)
        self.mpi.COMM_WORLD.Abort(code)


def start_no_thread(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")


def fault(kind, who):
    """Sum numbers on all ranks; after eleven sums rank ``who`` fails, the others go on.

    If ``kind`` is 'leave and hang', the next rank hangs. As in Python 3.12, a program that is
    ending cannot start threads.
    """
    print(f"pid {os.getpid()}", flush=True)
    x = mx.nd.ones((1000,))
    if cluster.size() > 1:  # so that no rank is late because it started later
        world.world().comm.Barrier()
    if kind == "stop, slowly ended":
        detector = world.world().detector
        detector._mpi = SlowMpi(detector._mpi)
    atexit.register(setattr, threading.Thread, "start", start_no_thread)
    for i in range(11 if kind in AT_THE_END else 10**9):
        cluster.allreduce([x])
        x /= cluster.size()
        x.wait_to_read()
        if i == 10 and cluster.rank() == who:
            print("now", flush=True)
            FAULTS[kind]()
        if i == 10 and cluster.rank() == who + 1 and kind == "leave and hang":
            FAULTS["hang"]()
        time.sleep(0.01)


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    if task in FAULTS:
        fault(task, int(*arguments))
    else:
        globals()[task](*arguments)
