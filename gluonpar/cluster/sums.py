"""How the ranks add up an array: what measured fastest (docs/cluster.md).

All ranks call the same function, one at a time, with arrays of like size and dtype, and all end
with the same bits, because each element is added up by one rank only or by MPI.
"""

from __future__ import annotations

import numpy as np

from gluonpar.cluster.world import World

BLOCK_BYTES = 1 << 19  # it stays in a core's second-level cache between arriving and being added
BLOCKS_FROM_BYTES = 1 << 23


def allreduce(job: World, flat: np.ndarray) -> None:
    """Replace ``flat``, one-dimensional and of a dtype that MPI adds, by its sum over all ranks."""
    if job.one_machine and flat.nbytes >= BLOCKS_FROM_BYTES:
        in_blocks(job, flat)
    else:
        job.comm.Allreduce(job.mpi.IN_PLACE, flat)


def in_blocks(job: World, flat: np.ndarray) -> None:
    """Each rank adds up one part, block by block; then all parts go to all.

    A reduce-scatter and an all-gather, both direct: ``2 (P - 1)`` steps and ``2 n (P - 1) / P``
    elements in and out of a rank. MPI's own reduction brings a part over whole, and reads it from
    memory again to add it; a block is still in the cache.
    """
    parts = np.array_split(flat, job.size)
    mine, block = parts[job.rank], max(1, BLOCK_BYTES // flat.itemsize)
    arriving = np.empty(block, flat.dtype)
    for start in range(0, max(part.size for part in parts), block):
        own = mine[start : start + block]
        for to, source in _pairs(job):
            leaving = parts[to][start : start + block]
            job.comm.Sendrecv(leaving, to, 0, arriving[: own.size], source, 0)
            np.add(own, arriving[: own.size], out=own)
    for to, source in _pairs(job):
        job.comm.Sendrecv(mine, to, 0, parts[source], source, 0)


def as_float16(job: World, flat: np.ndarray) -> None:
    """The same for floats sent as float16, and added in float32: MPI has no float16.

    A reduce-scatter and an all-gather, both direct: ``2 n (P - 1) / P`` elements in and out of a
    rank, of two bytes each.
    """
    halves = flat if flat.dtype == np.float16 else flat.astype(np.float16)
    bits, kind = halves.view(np.uint16), job.mpi.UINT16_T
    counts = [part.size for part in np.array_split(flat, job.size)]
    mine = counts[job.rank]
    brought = np.empty((job.size, mine), np.float16)
    received = [brought.view(np.uint16), [mine] * job.size]
    job.comm.Alltoallv([bits, counts, kind], [*received, kind])
    sums = brought[0].astype(np.float32)
    for other in brought[1:]:
        np.add(sums, other, out=sums)
    with np.errstate(over="ignore"):  # what is too large for float16 is infinite, as documented
        part = sums.astype(np.float16)
    job.comm.Allgatherv([part.view(np.uint16), kind], [bits, counts, kind])
    if halves is not flat:
        np.copyto(flat, halves)


def _pairs(job: World) -> list[tuple[int, int]]:
    """Whom this rank sends to and receives from, step by step: every rank is in one pair a step."""
    return [((job.rank + i) % job.size, (job.rank - i) % job.size) for i in range(1, job.size)]
