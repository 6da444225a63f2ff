"""Training in several processes, on one machine or several, through MPI.

A process that mpirun or srun started as one of several joins the others at the first call of
:func:`rank` or any other function here. Any other process is rank 0 of 1, and does not import MPI.
In a process that is forked from a rank, such as a DataLoader's worker, rank and size are the
parent's, and whatever communicates raises RuntimeError. How to start a job, and what ends it:
docs/cluster.md.
"""

from gluonpar.cluster.join import join
from gluonpar.cluster.process_collectives import (  # noqa: F401 - other packages use all of them
    PendingGather,
    all_gather,
    allreduce,
    allreduce_rows,
    broadcast,
    broadcast_object,
    check_equal,
    check_equal_async,
    draw_apart,
    gather,
    gather_to_first,
    note,
    together,
    total,
)
from gluonpar.cluster.world import (  # noqa: F401 - other packages use all of them
    abort,
    in_scope,
    is_local,
    is_main,
    local,
    local_rank,
    rank,
    scope,
    size,
)

__all__ = [
    "abort",
    "allreduce",
    "broadcast",
    "gather",
    "is_main",
    "join",
    "local",
    "local_rank",
    "rank",
    "size",
    "total",
]
