"""The processes of Horovod with gloo, and of MXNet's own parameter server; MXNet as it comes."""

from __future__ import annotations

import mxnet as mx
from mxnet import gluon as mxnet_gluon

from benchmarks.cluster.joined import Joined
from benchmarks.training.gluon import Gluon


class Horovod(Joined):
    """Each rank a Gluon network with Horovod's DistributedTrainer."""

    def __init__(self, size: int, batch_size: int) -> None:
        import horovod.mxnet as hvd

        self.hvd = hvd
        hvd.init()
        super().__init__(hvd.rank(), size, batch_size)
        self.training = Gluon(self.own, [mx.cpu()], hvd.DistributedTrainer)
        hvd.broadcast_parameters(self.training.net.collect_params(), root_rank=0)
        self.training.batch_size = batch_size / size  # the Trainer divides by the ranks, too

    def barrier(self) -> None:
        """A sum of one number."""
        self.hvd.allreduce(mx.nd.ones((1,)), name="barrier").wait_to_read()

    def allreduce(self, n: int, x: mx.nd.NDArray) -> mx.nd.NDArray:
        """In place."""
        return self.hvd.allreduce_(x, average=False, name=str(n))


class Servers(Joined):
    """A worker of the parameter server, which sums."""

    def __init__(self, size: int, batch_size: int) -> None:
        self.store, self.known = mx.kv.create("dist_sync"), set()
        super().__init__(self.store.rank, size, batch_size)

    def barrier(self) -> None:
        """The servers'."""
        self.store._barrier()

    def allreduce(self, n: int, x: mx.nd.NDArray) -> mx.nd.NDArray:
        """A push and a pull."""
        key = f"sum of {n}"
        if key not in self.known:
            self.known.add(key)
            self.store.init(key, mx.nd.zeros((n,)))
        total = mx.nd.empty((n,))
        self.store.push(key, x)
        self.store.pull(key, total)
        return total


class ServersTrain(Servers):
    """A worker whose Trainer sends gradients to the servers, and fetches updated weights."""

    def __init__(self, size: int, batch_size: int) -> None:
        super().__init__(size, batch_size)
        self.training = Gluon(self.own, [mx.cpu()], self._trainer)
        self.training.batch_size = batch_size

    def _trainer(self, *given) -> mxnet_gluon.Trainer:
        return mxnet_gluon.Trainer(*given, kvstore=self.store)


KINDS = {"horovod": Horovod, "dist_sync": Servers, "trainer dist_sync": ServersTrain}


def join(candidate: str, size: int, batch_size: int) -> Joined:
    """This process of ``candidate``."""
    return KINDS[candidate](size, batch_size)
