"""The ranks of gluonpar under mpirun, and of MXNet's own parameter server.

gluonpar is imported only where it is measured.
"""

from __future__ import annotations

import mxnet as mx

from benchmarks.training import gluon
from benchmarks.training.training import Rank, Training, shard
from benchmarks.training.workloads import Task


class GluonparRank(Rank):
    """A process of an MPI job; ``kind`` is how it trains, "train_batch" or "trainer"."""

    def __init__(self, task: Task, kind: str) -> None:
        from benchmarks.training.train_batch import TrainBatch
        from gluonpar import cluster

        self.cluster = cluster
        rank, size, n = cluster.rank(), cluster.size(), len(task.X)
        if size != len(task.devices):
            raise RuntimeError(f"{size} processes have joined, not {len(task.devices)}")
        part = shard(task, rank, size)
        if kind == "trainer":
            training = gluon.make(part, trainer="gluonpar")
            training.batch_size = n
        else:
            training = TrainBatch(part, n)
        super().__init__(rank, size, n, training)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.cluster.gather(None)

    def allreduce(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
        """Sum in place."""
        self.cluster.allreduce([x])
        return x


class ServerRank(Rank):
    """A worker of the parameter server. With ``kind`` "trainer" its Trainer sends gradients."""

    def __init__(self, task: Task, kind: str) -> None:
        self.store, self.known = mx.kv.create("dist_sync"), set()
        rank, size, training = self.store.rank, len(task.devices), None
        if kind == "trainer":
            mine = shard(task, rank, size)
            training = gluon.Gluon(mine, [mx.cpu()], self._trainer)
            training.batch_size = len(task.X)
        super().__init__(rank, size, len(task.X), training)

    def barrier(self) -> None:
        """Wait for all workers."""
        self.store._barrier()

    def allreduce(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
        """Push and pull."""
        key = f"sum of {x.size}"
        if key not in self.known:
            self.known.add(key)
            self.store.init(key, mx.nd.zeros(x.shape))
        total = mx.nd.empty(x.shape)
        self.store.push(key, x)
        self.store.pull(key, total)
        return total

    def _trainer(self, *given) -> mx.gluon.Trainer:
        return mx.gluon.Trainer(*given, kvstore=self.store)


def make(task: Task, store: str, kind: str) -> Training:
    """Return this process's rank."""
    return (GluonparRank if store == "gluonpar" else ServerRank)(task, kind)
