"""Sums and copies over lists of arrays, one a device; nothing of models or learning rates."""

# The modules of the algorithms are imported for what they register, in the order of ALGORITHMS.
from gluonpar.collectives import (  # isort: skip
    star,
    balanced,
    ring,
    bidirectional_ring,
    tree,
    halving_doubling,
    host,
    kvstore,
)
from gluonpar.collectives.bucket import allreduce_many
from gluonpar.collectives.choice import Choice
from gluonpar.collectives.plan import Hop
from gluonpar.collectives.reduction import (
    all_gather,
    allreduce,
    broadcast,
    broadcast_many,
    explain,
    reduce,
    reduce_scatter,
)
from gluonpar.collectives.registry import ALGORITHMS, named, register, register_executor
from gluonpar.collectives.tracing import Trace, trace

__all__ = [
    "ALGORITHMS",
    "Choice",
    "Hop",
    "Trace",
    "all_gather",
    "allreduce",
    "allreduce_many",
    "balanced",
    "bidirectional_ring",
    "broadcast",
    "broadcast_many",
    "explain",
    "halving_doubling",
    "host",
    "kvstore",
    "named",
    "reduce",
    "reduce_scatter",
    "register",
    "register_executor",
    "ring",
    "star",
    "trace",
    "tree",
]
