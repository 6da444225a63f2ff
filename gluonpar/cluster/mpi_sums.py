"""How an array is summed over ranks by MPI; figures in docs/cluster.md.

All ranks call the same function with arrays of equal size and dtype, while they hold the lock of
MPI. All end with the same bits, because one rank, or MPI, adds each element.
"""

from __future__ import annotations

import numpy as np

from gluonpar.cluster.world import World

BLOCK_BYTES = 1 << 19  # stays in a core's second-level cache between its arrival and the addition
BLOCKS_FROM_BYTES = 1 << 23


def allreduce(job: World, flat: np.ndarray) -> None:
    """Replace ``flat``, one-dimensional and of a dtype that MPI adds, by its sum over all ranks."""
    if job.one_machine and flat.nbytes >= BLOCKS_FROM_BYTES:
        allreduce_in_blocks(job, flat)
    else:
        job.comm.Allreduce(job.mpi.IN_PLACE, flat)


def allreduce_in_blocks(job: World, flat: np.ndarray) -> None:
    """Reduce-scatter block by block, then all-gather, each rank directly with each other.

    ``2 (P - 1)`` steps and ``2 n (P - 1) / P`` elements in and out of a rank. MPI's own reduction
    receives a whole part and reads it from memory again to add it; a block is still in the cache.
    """
    parts = np.array_split(flat, job.size)
    own, block = parts[job.rank], max(1, BLOCK_BYTES // flat.itemsize)
    received = np.empty(block, flat.dtype)
    for start in range(0, max(part.size for part in parts), block):
        sums = own[start : start + block]
        for to, source in _pairs(job):
            sent = parts[to][start : start + block]
            job.comm.Sendrecv(sent, to, 0, received[: sums.size], source, 0)
            np.add(sums, received[: sums.size], out=sums)
    for to, source in _pairs(job):
        job.comm.Sendrecv(own, to, 0, parts[source], source, 0)


def allreduce_as_float16(job: World, flat: np.ndarray) -> None:
    """Send floats as float16 and add them in float32; MPI has no float16.

    A reduce-scatter and an all-gather, each rank directly with each other: ``2 n (P - 1) / P``
    elements of two bytes in and out of a rank. Sums too large for float16 become infinite.
    """
    halves = flat if flat.dtype == np.float16 else flat.astype(np.float16)
    bits, kind = halves.view(np.uint16), job.mpi.UINT16_T
    counts = [part.size for part in np.array_split(flat, job.size)]
    own = counts[job.rank]
    received = np.empty((job.size, own), np.float16)
    to = [received.view(np.uint16), [own] * job.size, kind]
    job.comm.Alltoallv([bits, counts, kind], to)
    sums = received[0].astype(np.float32)
    for other in received[1:]:
        np.add(sums, other, out=sums)
    with np.errstate(over="ignore"):
        part = sums.astype(np.float16)
    job.comm.Allgatherv([part.view(np.uint16), kind], [bits, counts, kind])
    if halves is not flat:
        np.copyto(flat, halves)


def _pairs(job: World) -> list[tuple[int, int]]:
    """Return, for each step, the rank to send to and the rank to receive from."""
    return [((job.rank + i) % job.size, (job.rank - i) % job.size) for i in range(1, job.size)]
