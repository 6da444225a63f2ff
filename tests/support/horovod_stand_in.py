"""A package of Horovod's names for two ranks, as far as the benchmark calls it; no Horovod."""


def write(folder):
    """Make the package in ``folder``; its ranks add up their gradients through a socket."""
    for name, source in SOURCES.items():
        path = folder / "horovod" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


SOURCES = {
    "__init__.py": "__version__ = 'stand-in'",
    "mxnet.py": """
import os
from multiprocessing import connection
import mxnet as mx
from horovod.runner.http import http_server
def gloo_built():
    return True
def init():
    global rank, wire
    rank, port = int(os.environ['RANK']), int(os.environ['PORT'])
    assert os.environ['SIZE'] == '2' and os.environ['IFACE'] == 'lo'
    wire = connection.Client(('127.0.0.1', port)) if rank else http_server.listener.accept()
def exchange(mine):
    theirs = wire.recv() if rank else None
    wire.send(mine.asnumpy())
    return theirs if rank else wire.recv()
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
    "runner/__init__.py": "",
    "runner/gloo_run.py": """
def create_run_env_vars(server_ip, nics, port):
    assert server_ip == '127.0.0.1'
    return {'PORT': port, 'IFACE': nics[0]}
def create_slot_env_vars(slot):
    return {'RANK': slot, 'SIZE': 2}
""",
    "runner/common/__init__.py": "",
    "runner/common/util/__init__.py": "",
    "runner/common/util/hosts.py": """
def parse_hosts(text):
    assert text == 'localhost:2'
    return text
def get_host_assignments(hosts, num_proc):
    return list(range(num_proc))
""",
    "runner/http/__init__.py": "",
    "runner/http/http_server.py": """
from multiprocessing import connection
class RendezvousServer:
    def start(self):
        global listener
        listener = connection.Listener(('127.0.0.1', 0))
        return listener.address[1]
    def init(self, slots):
        assert slots == [0, 1]
""",
}
