"""A package with Horovod's names, and its launcher, as far as the benchmarks use them."""

import sys


def write(folder):
    """Make the package and a Python with a horovodrun in ``folder``; return that Python's path.

    Two ranks add their arrays through a socket.
    """
    for name, source in SOURCES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


SOURCES = {
    "bin/horovodrun": """
import os, socket, subprocess, sys
arguments = sys.argv[1:]
assert arguments[:5] == ['--gloo', '-np', '2', '-H', 'localhost:2'], arguments
with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = str(free.getsockname()[1])
ranks = [
    subprocess.Popen(arguments[5:], env={**os.environ, 'RANK': rank, 'PORT': port})
    for rank in '01'
]
sys.exit(max(rank.wait() for rank in ranks))
""",
    "horovod/__init__.py": "__version__ = 'stand-in'",
    "horovod/mxnet.py": """
import os, time
from multiprocessing import connection
import mxnet as mx
def gloo_built():
    return True
def init():
    global wire
    address = '127.0.0.1', int(os.environ['PORT'])
    if rank() == 0:
        wire = connection.Listener(address).accept()
    while rank() == 1:
        try:
            wire = connection.Client(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
def rank():
    return int(os.environ['RANK'])
def size():
    return 2
def exchange(mine):
    theirs = wire.recv() if rank() else None
    wire.send(mine.asnumpy())
    return theirs if rank() else wire.recv()
def allreduce_(x, average, name):
    assert not average
    x += mx.nd.array(exchange(x))
    return x
def allreduce(x, name):
    return mx.nd.array(exchange(x)) + x
def broadcast_parameters(params, root_rank):
    for name, param in sorted(params.items()):
        theirs = exchange(param.data())
        assert (theirs == param.data().asnumpy()).all()
class DistributedTrainer(mx.gluon.Trainer):
    def __init__(self, params, optimizer, optimizer_params):
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        self._scale /= 2
    def _allreduce_grads(self):
        for param in self._params:
            grad = param.list_grad()[0]
            grad += mx.nd.array(exchange(grad))
""",
}
