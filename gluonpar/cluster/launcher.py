"""Whether an MPI launcher (mpirun, mpiexec, srun) has started this process as one of several.

Read from the environment alone, so that nobody who trains in one process pays for MPI.
"""

from __future__ import annotations

import os
from typing import MutableMapping

# What says how many processes there are: Open MPI's mpirun; MPICH's, Intel's and srun's PMI.
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# PMIx, as srun --mpi=pmix has it, gives a rank only; Slurm says how many tasks its step has.
PMIX_RANK, SLURM_TASKS = "PMIX_RANK", "SLURM_STEP_NUM_TASKS"
# The process that has joined; one that it starts inherits the environment, but not its place.
JOINED = "GLUONPAR_CLUSTER_PID"


def launched(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether this is one of several processes of an MPI job, as far as the environment says.

    >>> launched({"OMPI_COMM_WORLD_SIZE": "2"}), launched({"PMI_SIZE": "1"}), launched({})
    (True, False, False)
    """
    if environment.get(JOINED, str(os.getpid())) != str(os.getpid()):
        return False
    for name in SIZES:
        if name in environment:
            return int(environment[name]) > 1
    return PMIX_RANK in environment and environment.get(SLURM_TASKS) != "1"


def mark_joined(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have :func:`launched` be False in processes that this one starts."""
    environment[JOINED] = str(os.getpid())
