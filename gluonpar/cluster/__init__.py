"""Several processes, on one machine or many, that train as one through MPI.

Started by mpirun or srun as one of several processes, this one joins the others the first time
that it is asked for its :func:`rank`; otherwise it is rank 0 of 1, and nothing of MPI is imported.
How to start a job, and what ends it: docs/cluster.md.
"""

from gluonpar.cluster.agreement import agree, together
from gluonpar.cluster.exchange import Later, allreduce, broadcast, gather, total
from gluonpar.cluster.world import is_main, rank, size

__all__ = [
    "Later",
    "agree",
    "allreduce",
    "broadcast",
    "gather",
    "is_main",
    "rank",
    "size",
    "together",
    "total",
]
