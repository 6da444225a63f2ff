"""Reduce-scatter and all-gather: part i of an array belongs to the array at position i.

With several processes positions count the arrays of all of them, in the order of the ranks.
"""

from __future__ import annotations

from typing import Sequence

import mxnet as mx

from gluonpar import cluster
from gluonpar.collectives import executor, host
from gluonpar.collectives.choice import on_host
from gluonpar.collectives.exchange import Exchange, as_one, in_buckets
from gluonpar.plans import partition
from gluonpar.plans.algorithms import balanced


@as_one
def reduce_scatter(exchange: Exchange, data: Sequence[mx.nd.NDArray]) -> None:
    """Replace part i of the array at position i by the sum of part i of all arrays."""
    if not data[0].size:
        return
    if exchange.num_processes > 1 or exchange.op == "mean":
        total = data[0].copy()
        name = f"reduce-scatter of {exchange.num_arrays} arrays"
        exchange.reduce(in_buckets([[total, *data[1:]]]), name)
        sums, *flat = executor.flattened([total, *data])
        for part, array in zip(_parts(exchange, data), flat):
            if part.start < part.stop:
                sums[part].copyto(array[part])
        return
    k = len(data)
    if on_host(exchange.ctx):
        parts = partition.slices(data[0].size, k)
        sums = [(part, host.starting_with(i, k), []) for i, part in enumerate(parts)]
        host.run([data], sums, exchange.op)
    else:
        own_chunks = [(i, i) for i in range(k)]
        executor.run(balanced.reduce_scatter(k), executor.flattened(data), exchange.op, own_chunks)


@as_one
def all_gather(exchange: Exchange, data: Sequence[mx.nd.NDArray]) -> None:
    """Replace part i of every array by part i of the array at position i."""
    if not data[0].size:
        return
    k, parts = len(data), partition.slices(data[0].size, len(data))
    if exchange.num_processes > 1:
        _all_gather_over_ranks(exchange, data)
    elif on_host(exchange.ctx):
        copies = [(part, [i], host.starting_with(i, k)[1:]) for i, part in enumerate(parts)]
        host.run([data], copies)
    else:
        executor.run(balanced.all_gather(k), executor.flattened(data))


def _all_gather_over_ranks(exchange: Exchange, data: Sequence[mx.nd.NDArray]) -> None:
    first, *others = executor.flattened(data)
    for part, array in zip(_parts(exchange, data)[1:], others):
        if part.start < part.stop:
            array[part].copyto(first[part])
    sizes = partition.sizes(data[0].size, exchange.num_arrays)
    of_ranks = [sum(sizes[i : i + len(data)]) for i in range(0, len(sizes), len(data))]
    cluster.all_gather(data[0], of_ranks, f"all-gather of {exchange.num_arrays} arrays")
    exchange.inside.broadcast(in_buckets([data]))


def _parts(exchange: Exchange, data: Sequence[mx.nd.NDArray]) -> list[slice]:
    """Return the parts of this process's arrays."""
    parts = partition.slices(data[0].size, exchange.num_arrays)
    return parts[cluster.rank() * len(data) :][: len(data)]
