"""Collectives on lists of arrays, one array per device: all-reduce, broadcast and their relatives.

Nothing here depends on models or optimizers.
"""

from gluonpar.collectives.choice import Choice, check_algorithm, usable
from gluonpar.collectives.exchange import (  # noqa: F401 - for the other rooms
    BUCKET_BYTES,
    Exchange,
    grouped,
    in_buckets,
)
from gluonpar.collectives.executor import EXECUTORS, Executor, register_executor
from gluonpar.collectives.operations import (  # noqa: F401 - exchange_of is for the other rooms
    all_gather,
    allreduce,
    allreduce_many,
    broadcast,
    exchange_of,
    explain,
    reduce,
    reduce_scatter,
)
from gluonpar.plans import ALGORITHMS, Hop, Trace, algorithms, check, register, trace
from gluonpar.runtime import nccl

register_executor("nccl", refusal=nccl.refusal, reduce=nccl.reduce, broadcast=nccl.broadcast)(
    nccl.allreduce
)

__all__ = ["ALGORITHMS", "EXECUTORS", "Choice", "Executor", "Hop", "Trace", "algorithms"]
__all__ += ["all_gather", "allreduce", "allreduce_many", "broadcast", "check", "check_algorithm"]
__all__ += [
    "explain",
    "reduce",
    "reduce_scatter",
    "register",
    "register_executor",
    "trace",
    "usable",
]
