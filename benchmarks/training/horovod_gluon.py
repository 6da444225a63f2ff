"""Horovod's DistributedTrainer with gloo: a process a device, each a Gluon network on its shard.

``horovodrun`` would keep the processes' stdin to itself, so rank 0 does what it does (horovod.
runner.gloo_run of 0.28.1): it starts the server where the ranks meet, and the other ranks.

It has been run with Horovod 0.28.1 built from source with gloo only, under MXNet 1.9.1, NumPy 1.23
and Python 3.11: two and three ranks end at the loss of gluon.Trainer. The tests take a stand-in of
the functions that it calls. A thread of each rank looks for work every millisecond, between steps,
too (HOROVOD_CYCLE_TIME): a rank that waits burns 5 to 20 % of a core.
"""

from __future__ import annotations

import os
from typing import Any

from . import process, ranks
from .training import Training
from .workloads import Task

MODULE = "horovod_gluon"
LOCALHOST, LOOPBACK = "127.0.0.1", "lo"

try:
    import horovod
    import horovod.mxnet as hvd
    from horovod.runner import gloo_run
    from horovod.runner.common.util import hosts
    from horovod.runner.http import http_server
except ImportError as error:
    hvd, _missing = None, str(error)


def make(task: Task, rank: int = 0) -> Training:
    """The training of ``task``; rank 0 starts the other ranks."""
    if hvd is None:
        raise process.Unable(
            f"horovod.mxnet cannot be imported ({_missing}); --horovod-python may name an "
            "interpreter that has it"
        )
    if not hvd.gloo_built():
        raise process.Unable("this Horovod was built without gloo (HOROVOD_WITH_GLOO=1)")
    ranks.need_cpus(task)
    if rank:
        return _join(task, rank, [])
    server = http_server.RendezvousServer()  # its thread waits for requests, and ends with us
    mine, *others = _environments(server, len(task.devices))
    followers = [
        ranks.follow(MODULE, task, {"rank": r}, env, runtime="mxnet")
        for r, env in enumerate(others, 1)
    ]
    os.environ.update(mine)
    led = _join(task, 0, followers)
    for follower in followers:
        follower.hear()
    return led


def _environments(server: Any, num_ranks: int) -> list[dict[str, str]]:
    """Start ``server``; what each rank needs in its environment to find it and the others."""
    slots = hosts.get_host_assignments(hosts.parse_hosts(f"localhost:{num_ranks}"), num_ranks)
    port = server.start()
    server.init(slots)
    shared = gloo_run.create_run_env_vars(LOCALHOST, [LOOPBACK], port)
    each = [{**shared, **gloo_run.create_slot_env_vars(slot)} for slot in slots]
    return [{name: str(value) for name, value in env.items()} for env in each]


def _join(task: Task, rank: int, followers: list[process.Child]) -> Training:
    import mxnet as mx

    from .gluon import Gluon

    hvd.init()
    mine, n = ranks.shard(task, rank), len(task.X)
    own = Gluon(mine, [mx.cpu()], hvd.DistributedTrainer)
    hvd.broadcast_parameters(own.net.collect_params(), root_rank=0)
    own.batch_size = n / len(task.devices)  # the Trainer divides the sum by the ranks, too
    return ranks.Rank(own, len(mine.X) / n, followers)


VERSION = f"horovod {horovod.__version__}, gloo" if hvd else ""
