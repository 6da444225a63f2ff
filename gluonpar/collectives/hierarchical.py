"""Hierarchical collectives: over all devices of all processes.

A hierarchical all-reduce sums inside each process onto one device, the *leader*, exchanges the
leaders' arrays between processes, and broadcasts the result inside each process: the network
carries one array per process, however many devices there are. With one process only the first of
the three happens. Every function works in place and asynchronously.
"""

from __future__ import annotations

from typing import Sequence

import mxnet as mx

from gluonpar import cluster
from gluonpar.collectives import arguments, operations

Lists = Sequence[Sequence[mx.nd.NDArray]]


def allreduce_many(
    lists: Lists,
    algorithm: str | None = None,
    compression: str | None = None,
    one_message: bool = False,
) -> None:
    """Replace every array of each list, one per device, by the sum over all processes' devices.

    ``algorithm`` is that of the sum inside the process; another than 'nccl' also keeps NCCL from
    summing over processes. With ``compression='fp16'`` float16 is exchanged, and added in float32.
    Between processes each bucket of lists is a message, so that the first can be sent while the
    last is still being computed, or with ``one_message`` all together.
    """
    _sum_inside(lists, None, algorithm, compression)
    if cluster.size() > 1:
        by_nccl = algorithm in (None, "nccl")
        _exchange(lists, [0] * len(lists), compression, by_nccl, one_message)
        operations.broadcast_many(lists)


def reduce_many(
    lists: Lists,
    leaders: Sequence[int],
    algorithm: str | None = None,
    compression: str | None = None,
) -> None:
    """Replace ``lists[j][leaders[j]]``, in every process, by the sum of :func:`allreduce_many`.

    The other arrays of a list are left as they are, or hold the sum over this process's devices if
    an algorithm is named or the exchange is compressed.
    """
    _sum_inside(lists, leaders, algorithm, compression)
    if cluster.size() > 1:
        _exchange(lists, leaders, compression, algorithm in (None, "nccl"))


def broadcast_many(lists: Lists) -> None:
    """Replace every array of each list by the first device's of rank 0."""
    cluster.broadcast([data[0] for data in lists])
    operations.broadcast_many(lists)


def _sum_inside(
    lists: Lists, leaders: Sequence[int] | None, algorithm: str | None, compression: str | None
) -> None:
    if compression:
        operations.allreduce_as_float16(lists, algorithm)
    elif leaders is None or algorithm:
        operations.allreduce_many(lists, algorithm)
    else:
        operations.reduce_many(lists, leaders)


def _exchange(
    lists: Lists,
    leaders: Sequence[int],
    compression: str | None,
    by_nccl: bool,
    one_message: bool = False,
) -> None:
    kinds = [arguments.check_list(data) for data in lists]
    buckets = [range(len(lists))] if one_message else operations.in_buckets(kinds, roots=leaders)
    for bucket in buckets:
        cluster.allreduce([lists[j][leaders[j]] for j in bucket], compression, by_nccl)
