"""Sums an array over ranks, by MPI. docs/performance.md says how fast.

All ranks end with the same bits, because each element is added by one rank, or by MPI.
"""

from __future__ import annotations

import numpy as np

from gluonpar.cluster.world import World
from gluonpar.plans.plan import COMBINE

BLOCK_BYTES = 1 << 19  # so much stays in a core's second-level cache until it is added
BLOCKS_FROM_BYTES = 1 << 23  # ranks of one machine sum arrays of this size and more in blocks


def allreduce(job: World, flat: np.ndarray, op: str = "sum", as_float16: bool = False) -> None:
    """Replace the one-dimensional ``flat`` by its ``op`` over all ranks; hold ``job.mpi_lock``.

    ``op`` is 'sum', 'max' or 'min'. float16, and with ``as_float16`` every float dtype, is sent as
    float16 and added in float32. Integers wrap around; a sum of bools is whether any is true.
    """
    wire = np.dtype(np.float16) if as_float16 and flat.dtype.kind == "f" else flat.dtype
    as_mpi = op == "sum" and wire != np.float16
    if as_mpi and job.one_machine and flat.nbytes >= BLOCKS_FROM_BYTES:
        _allreduce_in_blocks(job, flat)
    elif not as_mpi or wire.itemsize == 1:  # Open MPI's sums of 16 or more bytes saturate
        _allreduce_in_parts(job, flat, wire, op)
    else:
        job.comm.Allreduce(job.mpi.IN_PLACE, flat)


@np.errstate(over="ignore")  # larger values become infinite
def allreduce_rows(
    job: World, indices: np.ndarray, rows: np.ndarray, as_float16: bool = False, number: int = 1
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the union of all ranks' indices, the sums of their rows, and the sum of ``number``.

    ``indices`` (n,) are int64 and rising, ``rows`` are (n, size); n may be 0. Rows are added in the
    order of the ranks, and in the dtypes of :func:`allreduce`.
    """
    wire = np.dtype(np.float16) if as_float16 and rows.dtype.kind == "f" else rows.dtype
    counts, numbers = zip(*job.comm.allgather((len(indices), number)))
    of_ranks = np.empty(sum(counts), np.int64)
    received = np.empty((sum(counts), rows.shape[1]), wire)
    for own, every in ((indices, of_ranks), (rows, received)):
        row = job.mpi.BYTE.Create_contiguous(every.itemsize * every[:1].size or 1).Commit()
        sent = np.ascontiguousarray(own, every.dtype)
        job.comm.Allgatherv([sent, len(indices), row], [every, [*counts], row])
        row.Free()
    union = np.unique(of_ranks)
    wide = np.float32 if wire == np.float16 else wire
    total, ends = np.zeros((len(union), rows.shape[1]), wide), np.cumsum(counts)[:-1]
    for some, values in zip(np.split(of_ranks, ends), np.split(received, ends)):
        total[np.searchsorted(union, some)] += values
    return union, total.astype(wire).astype(rows.dtype, copy=False), sum(numbers)


def _allreduce_in_blocks(job: World, flat: np.ndarray) -> None:
    """Reduce-scatter block by block, then all-gather; each rank sends to each other directly."""
    # MPI's own reduction receives a whole part, and reads it from memory again to add it.
    parts = np.array_split(flat, job.size)
    own, block = parts[job.rank], max(1, BLOCK_BYTES // flat.itemsize)
    received = np.empty(block, flat.dtype)
    # For each step, the rank to send to and the rank to receive from.
    pairs = [((job.rank + i) % job.size, (job.rank - i) % job.size) for i in range(1, job.size)]
    for start in range(0, max(part.size for part in parts), block):
        sums = own[start : start + block]
        for to, source in pairs:
            sent = parts[to][start : start + block]
            job.comm.Sendrecv(sent, to, 0, received[: sums.size], source, 0)
            np.add(sums, received[: sums.size], out=sums)
    for to, source in pairs:
        job.comm.Sendrecv(own, to, 0, parts[source], source, 0)


@np.errstate(over="ignore")
def _allreduce_in_parts(job: World, flat: np.ndarray, wire: np.dtype, op: str) -> None:
    """Reduce-scatter and all-gather bits, as MPI has no float16, nor an order for NaN in 'max'."""
    sent, bits = flat.astype(wire, copy=False), f"u{wire.itemsize}"
    counts = [part.size for part in np.array_split(sent, job.size)]
    own = counts[job.rank]
    received = np.empty((job.size, own), wire)
    job.comm.Alltoallv([sent.view(bits), counts], [received.view(bits), [own] * job.size])
    wide = np.float32 if wire == np.float16 else wire
    part = COMBINE[op].reduce(received, axis=0, dtype=wide).astype(wire, copy=False)
    job.comm.Allgatherv(part.view(bits), [sent.view(bits), counts])
    if sent is not flat:
        np.copyto(flat, sent)
