"""gluonpar's processes under mpirun, and the floor: one process whose devices exchange nothing."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from benchmarks.cluster.joined import Joined
from benchmarks.training import gluon, ours
from gluonpar import cluster
from gluonpar.step import train_batch


class Plain(ours.Ours):
    """``train_batch`` with this rank's part of the batch."""

    def __init__(self, own: Any, batch_size: int) -> None:
        super().__init__(own)
        self.batch_size = batch_size

    def step(self) -> None:
        """What a user would call."""
        params, ctx, n = self.device_params, self.ctx, self.batch_size
        train_batch(self.X, self.y, params, ctx, self.lr, self.model, batch_size=n)


class Rank(Joined):
    """A process of the job."""

    def __init__(self, size: int, batch_size: int) -> None:
        super().__init__(cluster.rank(), size, batch_size)
        if cluster.size() != size:
            raise RuntimeError(f"{cluster.size()} processes have joined, not {size}")

    def barrier(self) -> None:
        """All ranks' wait."""
        cluster.gather(None)

    def allreduce(self, n: int, x: mx.nd.NDArray) -> mx.nd.NDArray:
        """In place."""
        cluster.allreduce([x])
        return x


class Alone(Joined):
    """The floor's only process: it has all devices, and nobody to wait for."""

    def barrier(self) -> None:
        """Nobody is waited for."""


def join(candidate: str, size: int, batch_size: int) -> Joined:
    """This process of ``candidate``."""
    if candidate == "floor":
        joined = Alone(0, size, batch_size)
        joined.training = ours.make(joined.whole, exchange=False)
        return joined
    joined = Rank(size, batch_size)
    if candidate == "gluonpar trainer":
        joined.training = gluon.make(
            joined.own,
            share_threads=True,
            kvstore="",
            trainer="gluonpar.gluon.trainer.Trainer",
            split="gluonpar.sharding.split_and_load",
        )
        joined.training.batch_size = batch_size
    else:
        joined.training = Plain(joined.own, batch_size)
    return joined
