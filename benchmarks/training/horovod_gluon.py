"""Horovod's DistributedTrainer with gloo: a process per device, each a Gluon network on its shard.

A background thread of each rank looks for work every millisecond (HOROVOD_CYCLE_TIME).
"""

from __future__ import annotations

import mxnet as mx

from benchmarks.training.gluon import Gluon
from benchmarks.training.training import Rank, Training, UnavailableError, shard
from benchmarks.training.workloads import Task

try:
    import horovod
    import horovod.mxnet as hvd
except ImportError as error:
    hvd, _missing = None, str(error)


class HorovodRank(Rank):
    """One of Horovod's processes."""

    def __init__(self, task: Task) -> None:
        hvd.init()
        self.version = f"horovod {horovod.__version__}, gloo"
        rank, size, n = hvd.rank(), hvd.size(), len(task.X)
        training = Gluon(shard(task, rank, size), [mx.cpu()], hvd.DistributedTrainer)
        hvd.broadcast_parameters(training.net.collect_params(), root_rank=0)
        training.batch_size = n / size  # the Trainer divides the sum by the ranks, too
        super().__init__(rank, size, n, training)

    def barrier(self) -> None:
        """Sum one number."""
        hvd.allreduce(mx.nd.ones((1,)), name="barrier").wait_to_read()

    def allreduce(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
        """Sum in place."""
        return hvd.allreduce_(x, average=False, name=str(x.size))


def make(task: Task) -> Training:
    """Return this rank's training."""
    if hvd is None:
        raise UnavailableError(
            f"horovod.mxnet cannot be imported ({_missing}); give --horovod-python an interpreter "
            "that has it"
        )
    if not hvd.gloo_built():
        raise UnavailableError("this Horovod was built without gloo (HOROVOD_WITH_GLOO=1)")
    return HorovodRank(task)
