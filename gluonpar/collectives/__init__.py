"""Collectives on lists of arrays, one array per device: all-reduce, broadcast and their relatives.

Nothing here depends on models or optimizers.
"""

from gluonpar.collectives import algorithms
from gluonpar.collectives.choice import Choice, check_algorithm, usable
from gluonpar.collectives.operations import (
    all_gather,
    allreduce,
    allreduce_many,
    broadcast,
    broadcast_many,
    explain,
    reduce,
    reduce_scatter,
)
from gluonpar.collectives.plan import Hop
from gluonpar.collectives.registry import ALGORITHMS, named, register, register_executor
from gluonpar.collectives.simulator import Simulation, simulate
from gluonpar.collectives.tracing import Trace, trace

__all__ = [
    "ALGORITHMS",
    "Choice",
    "Hop",
    "Simulation",
    "Trace",
    "algorithms",
    "all_gather",
    "allreduce",
    "allreduce_many",
    "broadcast",
    "broadcast_many",
    "check_algorithm",
    "explain",
    "named",
    "reduce",
    "reduce_scatter",
    "register",
    "register_executor",
    "simulate",
    "trace",
    "usable",
]
