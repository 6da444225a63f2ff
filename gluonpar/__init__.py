"""gluonpar: one model on several devices in MXNet/Gluon, by hand, where every step can be read."""

# ruff: noqa: E402, I001 - the runtime comes first: it prepares the process before MXNet is imported
from gluonpar import runtime

runtime.start()

from gluonpar.collectives import (
    all_gather,
    allreduce,
    allreduce_many,
    broadcast,
    explain,
    reduce,
    reduce_scatter,
)
from gluonpar.models import init_lenet, lenet
from gluonpar.optim import sgd
from gluonpar.replicas import get_params
from gluonpar.sharding import split_and_load
from gluonpar.step import train_batch
from gluonpar.train import train
from gluonpar.version import __version__

__all__ = [
    "__version__",
    "all_gather",
    "allreduce",
    "allreduce_many",
    "broadcast",
    "explain",
    "get_params",
    "init_lenet",
    "lenet",
    "reduce",
    "reduce_scatter",
    "sgd",
    "split_and_load",
    "train",
    "train_batch",
]
