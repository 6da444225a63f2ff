"""Carry out a plan with MXNet's own operators, on any contexts, asynchronously.

A chunk that arrives at a device is an array of its own, and so are partial sums. The given arrays
are only read until all sums are complete, and then written once. MXNet's engine, which orders
operators by the arrays that they read and write, therefore sees no dependencies but the plan's, and
runs the hops of one step in parallel.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Iterable, Iterator, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar.collectives import partition
from gluonpar.collectives.plan import Hop, num_chunks
from gluonpar.runtime import engine, memory

COMBINE = {
    "sum": mx.nd.elemwise_add,
    "mean": mx.nd.elemwise_add,  # divided by the number of arrays at the end
    "max": mx.nd.broadcast_maximum,
    "min": mx.nd.broadcast_minimum,
}


@contextlib.contextmanager
def flattened(
    data: Sequence[mx.nd.NDArray], dtype: str | None = None
) -> Iterator[list[mx.nd.NDArray]]:
    """Give flat ``mx.nd`` views of ``data``, with autograd paused.

    With ``dtype``, give copies of that dtype, which are cast back into ``data`` on exit.
    """
    on_cpu = [array for array in data if array.context.device_type == "cpu"]
    if on_cpu:  # MXNet cannot make views of an array in one of oneDNN's layouts
        settle = functools.partial(memory.settle, on_cpu)
        engine.push(settle, on_cpu[0].context, writes=on_cpu, inline=True)
    with autograd.pause(), mx.util.np_shape(True):  # np_shape: for arrays of 0 dimensions
        flat = [array.as_nd_ndarray().reshape((-1,)) for array in data]
        if dtype is None:
            yield flat
            return
        copies = [array.astype(dtype) for array in flat]
        yield copies
        for array, copy in zip(flat, copies):
            copy.astype(array.dtype).copyto(array)


def run(
    hops: Sequence[Hop],
    data: Sequence[mx.nd.NDArray],
    op: str = "sum",
    results: Iterable[tuple[int, int]] | None = None,
) -> None:
    """Carry out ``hops`` on ``data`` in place; ``data[i]`` is device i's array, flat.

    ``results`` names the (device, chunk) pairs to write; None means all of them. For 'mean' what is
    written is divided by the number of arrays.
    """
    if num_chunks(hops) == 1 and results is None:
        _run_in_place(hops, data, op)
        return
    cuts = partition.slices(data[0].size, num_chunks(hops))
    chunks = [[array[cut] if cut.start < cut.stop else None for cut in cuts] for array in data]
    values = [list(device) for device in chunks]
    for hop in hops:
        own = values[hop.dst][hop.chunk]
        if own is None:
            continue  # fewer elements than chunks
        value = values[hop.src][hop.chunk].copyto(own.context)
        values[hop.dst][hop.chunk] = COMBINE[op](value, own, out=value) if hop.reduce else value
    if results is None:
        results = [(i, c) for i in range(len(data)) for c in range(len(cuts))]
    for i, c in results:
        value, chunk = values[i][c], chunks[i][c]
        if chunk is not None:
            if op == "mean":
                value /= len(data)
            if value is not chunk:
                value.copyto(chunk)


def _run_in_place(hops: Sequence[Hop], data: Sequence[mx.nd.NDArray], op: str) -> None:
    """Carry out a plan of whole arrays, which gains nothing from writing at the end."""
    for hop in hops:
        source, own = data[hop.src], data[hop.dst]
        if hop.reduce:
            COMBINE[op](own, source.copyto(own.context), out=own)
        else:
            source.copyto(own)
    if op == "mean":
        for array in data:
            array /= len(data)
