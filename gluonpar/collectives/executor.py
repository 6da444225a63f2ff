"""Carry out a plan with MXNet's own operators, on any contexts, asynchronously.

A chunk that arrives at a device is an array of its own, and so are partial sums; the given arrays
are written once, at the end. MXNet's engine, which orders operators by the arrays that they read
and write, therefore sees no dependencies but the plan's, and runs the hops of a step in parallel.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Collection, Iterator, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar.collectives import mean
from gluonpar.plans import partition
from gluonpar.plans.plan import Hop, num_chunks
from gluonpar.runtime import engine, memory, peers

COMBINE = {"max": mx.nd.broadcast_maximum, "min": mx.nd.broadcast_minimum}
COMBINE["sum"] = mx.nd.broadcast_add  # elemwise_add knows no int8 on GPUs


@contextlib.contextmanager
def flattened(
    data: Sequence[mx.nd.NDArray], dtype: str | None = None, op: str = "sum"
) -> Iterator[list]:
    """Give flat ``mx.nd`` views of ``data``, with autograd paused.

    With ``dtype``, give copies of that dtype, which are cast back into ``data`` on exit; with
    ``op`` 'mean', give copies whose sums become the mean (:mod:`gluonpar.collectives.mean`).
    """
    on_cpu = [array for array in data if array.context.device_type == "cpu"]
    if on_cpu:  # MXNet cannot make views of an array in one of oneDNN's layouts
        settle = functools.partial(memory.settle, on_cpu)
        engine.push(settle, on_cpu[0].context, writes=on_cpu, inline=True)
    with autograd.pause(), mx.util.np_shape(True):  # np_shape: for arrays of 0 dimensions
        flat = [array.as_nd_ndarray().reshape((-1,)) for array in data]
        if op == "mean":
            sums = mean.scaled(flat, len(flat))
            yield sums
            for array, total in zip(flat, sums):
                mean.write(total, len(flat), [array])
            return
        copies = [array.astype(dtype) for array in flat] if dtype else []
        yield copies or flat
        for array, copy in zip(flat, copies):
            copy.astype(array.dtype).copyto(array)


def run(
    hops: Sequence[Hop], data: Sequence[mx.nd.NDArray], op: str = "sum", results: Collection = ()
) -> None:
    """Carry out ``hops`` on ``data`` in place; ``data[i]`` is device i's array, flat.

    ``results`` holds the (device, chunk) pairs to write; by default, all are written.
    """
    peers.enable([array.context for array in data])
    if op == "mean":
        _run_mean(hops, data, results)
        return
    if num_chunks(hops) == 1:
        _run_whole(hops, data, op, results)
        return
    cuts = _cuts(hops, data)
    chunks = {(i, c): array[cut] for i, array in enumerate(data) for c, cut in enumerate(cuts)}
    values = dict(chunks)
    for hop in hops:
        if hop.chunk < len(cuts):
            value = values[hop.src, hop.chunk].copyto(data[hop.dst].context)
            if hop.reduce:
                COMBINE[op](value, values[hop.dst, hop.chunk], out=value)
            values[hop.dst, hop.chunk] = value
    for place, chunk in chunks.items():
        value = values[place]
        if (not results or place in results) and value is not chunk:
            value.copyto(chunk)


def _run_whole(
    hops: Sequence[Hop], data: Sequence[mx.nd.NDArray], op: str, results: Collection
) -> None:
    """Carry out a plan of whole arrays, which gains nothing from writing at the end."""
    values = list(data)
    for hop in hops:
        source, own = values[hop.src], values[hop.dst]
        if hop.reduce:
            came = source.copyto(own.context)
            kept = not results or (hop.dst, 0) in results
            values[hop.dst] = COMBINE[op](own, came, out=own if kept else came)
        else:
            source.copyto(own)


def _run_mean(hops: Sequence[Hop], data: Sequence[mx.nd.NDArray], results: Collection) -> None:
    k, cuts = len(data), _cuts(hops, data)
    sums = mean.scaled(data, k)
    run(hops, sums, "sum", results)
    written = [(i, cuts[c]) for i, c in results if c < len(cuts)]
    for i, part in written if results else [(i, slice(None)) for i in range(k)]:
        mean.write(sums[i][part], k, [data[i][part]])


def _cuts(hops: Sequence[Hop], data: Sequence[mx.nd.NDArray]) -> list[slice]:
    """Return where the chunks of an array are, without the empty ones."""
    size = data[0].size
    return partition.slices(size, num_chunks(hops))[:size]
