"""How an array is summed over ranks by MPI; figures in docs/cluster.md.

All ranks end with the same bits, because one rank, or MPI, adds each element.
"""

from __future__ import annotations

import numpy as np

from gluonpar.cluster.world import World

BLOCK_BYTES = 1 << 19  # stays in a core's second-level cache between its arrival and the addition
BLOCKS_FROM_BYTES = 1 << 23


def allreduce(job: World, flat: np.ndarray, as_float16: bool = False) -> None:
    """Replace ``flat``, one-dimensional, by its sum over all ranks; ``job.mpi_lock`` is held.

    float16, and with ``as_float16`` any float, is sent as float16 and added in float32.
    """
    if flat.dtype == np.float16 or (as_float16 and flat.dtype.kind == "f"):
        _allreduce_as_float16(job, flat)
    elif job.one_machine and flat.nbytes >= BLOCKS_FROM_BYTES:
        _allreduce_in_blocks(job, flat)
    else:
        job.comm.Allreduce(job.mpi.IN_PLACE, flat)


def _allreduce_in_blocks(job: World, flat: np.ndarray) -> None:
    """Reduce-scatter block by block, then all-gather, each rank directly with each other."""
    # MPI's own reduction receives a whole part and reads it from memory again to add it.
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


def _allreduce_as_float16(job: World, flat: np.ndarray) -> None:
    """Reduce-scatter and all-gather of bits, as MPI has no float16; larger sums become infinite."""
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
    """For each step the rank to send to and the rank to receive from."""
    return [((job.rank + i) % job.size, (job.rank - i) % job.size) for i in range(1, job.size)]
