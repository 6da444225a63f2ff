"""Hierarchical collectives: over all devices of all processes, whoever calls them.

A hierarchical all-reduce sums inside each process onto one device, the *leader*, exchanges the
leaders' arrays between processes, and broadcasts the result inside each process: the network
carries one array per process, however many devices there are. With one process only the part
inside remains. Every function works in place and asynchronously. Where an array's position matters,
positions count the arrays of all ranks, in their order, equally many per rank.
"""

from __future__ import annotations

import itertools
from typing import Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from gluonpar import cluster
from gluonpar.collectives import executor, local
from gluonpar.collectives.local import BUCKET_BYTES, Lists
from gluonpar.plans import partition
from gluonpar.runtime import interrupts, memory

# In which the mean over processes is computed: sums of what is representable may not be.
_WIDER = {np.dtype("float16"): "float32", np.dtype("float32"): "float64"}


def allreduce_many(
    lists: Lists,
    algorithm: str | None = None,
    compression: str | None = None,
    op: str = "sum",
    accumulate: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace every array of each list, one per device, by the sum over all processes' devices.

    ``algorithm`` is that of the sum inside the process; another than 'nccl' also keeps NCCL from
    summing over processes. With ``compression='fp16'`` float16 is exchanged, and added in float32.
    Between processes consecutive lists of one dtype are a message, of up to ``bucket_bytes``, so
    that the first can be sent while the last is still being computed.
    ``op`` and ``accumulate`` are those of :func:`gluonpar.allreduce`.
    """
    if cluster.size() > 1:
        leaders = [0] * len(lists)
        with interrupts.held(), local.pushing:
            reduce_many(lists, leaders, algorithm, compression, op, accumulate, bucket_bytes)
            local.broadcast_many(lists)
    elif compression:
        local.allreduce_as_float16(lists, algorithm)
    else:
        local.allreduce_many(lists, algorithm, op, accumulate, bucket_bytes)


def reduce_many(
    lists: Lists,
    leaders: Sequence[int],
    algorithm: str | None = None,
    compression: str | None = None,
    op: str = "sum",
    accumulate: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    name: str = "allreduce",
) -> None:
    """Replace ``lists[j][leaders[j]]``, in every process, by the sum of :func:`allreduce_many`.

    The other arrays of a list are left as they are, or hold the sum over this process's devices if
    an algorithm is named or the exchange is compressed. ``name`` is what an error calls it.
    """
    _refuse_row_sparse(lists)
    with interrupts.held(), local.pushing:
        for message in _messages(lists, leaders, bucket_bytes):
            _sum_inside(message, algorithm, compression, op, accumulate, bucket_bytes)
            if cluster.size() > 1:
                arrays = [data[leader] for data, leader in message]
                if op == "mean":
                    _average(arrays, len(message[0][0]), name)
                else:
                    cluster.allreduce(arrays, compression, algorithm in (None, "nccl"), op, name)


def _sum_inside(message, algorithm, compression, op, accumulate, bucket_bytes: int) -> None:
    lists = [data for data, _ in message]
    if compression:
        local.allreduce_as_float16(lists, algorithm)
    elif algorithm or accumulate:
        local.allreduce_many(lists, algorithm, op, accumulate, bucket_bytes)
    else:
        for leader, of_leader in itertools.groupby(message, lambda item: item[1]):
            local.reduce_many([data for data, _ in of_leader], leader, op)


@local.as_one
def broadcast_many(lists: Lists, root: int = 0) -> None:
    """Replace every array of each list by the one at position ``root``."""
    if not lists:
        return
    rank, device = divmod(root, len(lists[0]))
    own = device if rank == cluster.rank() else 0
    name = f"broadcast of array {device} of rank {rank}"
    cluster.broadcast([data[own] for data in lists], rank, name)
    local.broadcast_many(lists, own)


@local.as_one
def reduce(data: Sequence[mx.nd.NDArray], root: int, op: str) -> None:
    """Replace the array at position ``root``, but no other one, by the sum."""
    rank, device = divmod(root, len(data))
    if rank != cluster.rank():
        with autograd.pause():
            data, device = [data[0].copy(), *data[1:]], 0
    reduce_many([data], [device], op=op, name=f"reduce to array {root} of {_number(data)}")


@local.as_one
def reduce_scatter(data: Sequence[mx.nd.NDArray], op: str) -> None:
    """Replace part i of the array at position i by the sum of part i of all arrays."""
    with autograd.pause():
        total = data[0].copy()
    reduce_many([[total, *data[1:]]], [0], op=op, name=f"reduce-scatter of {_number(data)} arrays")
    with executor.flattened([total, *data]) as (sums, *flat):
        for part, array in zip(_own_parts(data), flat):
            if part.start < part.stop:
                sums[part].copyto(array[part])


@local.as_one
def all_gather(data: Sequence[mx.nd.NDArray]) -> None:
    """Replace part i of every array by part i of the array at position i."""
    with executor.flattened(data) as (first, *others):
        for part, array in zip(_own_parts(data)[1:], others):
            if part.start < part.stop:
                array[part].copyto(first[part])
    sizes = partition.sizes(data[0].size, _number(data))
    of_ranks = [sum(sizes[i : i + len(data)]) for i in range(0, len(sizes), len(data))]
    cluster.all_gather(data[0], of_ranks, f"all-gather of {_number(data)} arrays")
    local.broadcast_many([data])


def _number(data: Sequence[mx.nd.NDArray]) -> int:
    return len(data) * cluster.size()


def _own_parts(data: Sequence[mx.nd.NDArray]) -> list[slice]:
    """The parts of this rank's arrays."""
    parts = partition.slices(data[0].size, _number(data))
    return parts[cluster.rank() * len(data) :][: len(data)]


def _refuse_row_sparse(lists: Lists) -> None:
    if cluster.size() > 1 and any(data[0].stype != "default" for data in lists):
        raise ValueError(
            "row_sparse arrays are not exchanged between processes: make the layer with "
            "sparse_grad=False, or sum over this process's devices, inside gluonpar.cluster.local()"
        )


def _messages(lists: Lists, leaders: Sequence[int], limit: int) -> Iterator[list]:
    """Give the pairs (list, leader) of each message; the same ones on all ranks.

    A message has consecutive lists of one dtype, and at most ``limit`` bytes or one list.
    """
    message, held, last = [], 0, None
    for data, leader in zip(lists, leaders):
        dtype, size = memory.kind(data[0])[1], memory.num_bytes(data[0])
        if message and (dtype != last or held + size > limit):
            yield message
            message, held = [], 0
        message.append((data, leader))
        held, last = held + size, dtype
    if message:
        yield message


def _average(arrays: Sequence[mx.nd.NDArray], num_devices: int, name: str) -> None:
    """Replace ``arrays``, means over this process's devices, by the means over all processes'."""
    arrays = [array for array in arrays if array.size]
    if not arrays:
        return
    dtype = memory.kind(arrays[0])[1]
    with executor.flattened(arrays, _WIDER.get(dtype, dtype.name)) as sums:
        for array in sums:
            array *= num_devices
        count = mx.nd.full((1,), num_devices, arrays[0].context, sums[0].dtype)
        cluster.allreduce([*sums, count], name=f"mean by {name}")
        for array in sums:
            mx.nd.broadcast_div(array, count.as_in_context(array.context), out=array)
