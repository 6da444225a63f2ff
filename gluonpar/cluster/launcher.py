"""Whether an MPI launcher (mpirun, mpiexec, srun) started this process as one of several.

Read from the environment alone: a single process does not load MPI.
"""

from __future__ import annotations

import os
from typing import MutableMapping

# The number of processes, as set by Open MPI's mpirun, and by the PMI of MPICH, Intel MPI and srun.
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# PMIx, as in srun --mpi=pmix, sets a rank only; Slurm sets the number of tasks of the job step.
PMIX_RANK, SLURM_TASKS = "PMIX_RANK", "SLURM_STEP_NUM_TASKS"
# The process that has joined the job; its child processes inherit the environment, not the rank.
JOINED = "GLUONPAR_CLUSTER_PID"


def launched(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether the environment is that of one of several processes of an MPI job.

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
    """Make :func:`launched` return False in processes that this one starts."""
    environment[JOINED] = str(os.getpid())
