"""A plan carried out with MXNet's own operators, on any contexts. Everything is asynchronous.

What arrives at a device is an array of its own, and partial sums stay there; the arrays given are
read until all is summed, and written once, at the end. So MXNet's engine, which orders operators by
the arrays they touch, sees only the dependencies that the plan has, and runs the hops of a step
side by side.
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
    "mean": mx.nd.elemwise_add,  # and then divide
    "max": mx.nd.broadcast_maximum,
    "min": mx.nd.broadcast_minimum,
}


@contextlib.contextmanager
def flattened(
    data: Sequence[mx.nd.NDArray], dtype: str | None = None
) -> Iterator[list[mx.nd.NDArray]]:
    """``data`` as flat ``mx.nd`` views, outside of autograd; as copies of another dtype, if given.

    What has been made of the copies is cast back into ``data`` at the end.
    """
    on_cpu = [array for array in data if array.context.device_type == "cpu"]
    if on_cpu:  # MXNet cannot make views of an array that oneDNN has left in a layout of its own
        settle = functools.partial(memory.settle, on_cpu)
        engine.push(settle, on_cpu[0].context, writes=on_cpu, inline=True)
    with autograd.pause(), mx.util.np_shape(True):  # np_shape: for arrays of 0 dimensions
        flat = [array.as_nd_ndarray().reshape((-1,)) for array in data]
        if dtype is None:
            yield flat
            return
        wide = [array.astype(dtype) for array in flat]
        yield wide
        for array, copy in zip(flat, wide):
            copy.astype(array.dtype).copyto(array)


def run(
    hops: Sequence[Hop],
    data: Sequence[mx.nd.NDArray],
    op: str = "sum",
    results: Iterable[tuple[int, int]] | None = None,
) -> None:
    """Carry out ``hops`` on ``data``, in place: ``data[i]`` is device i's array, flat.

    ``results`` names the (device, chunk) pairs that are to be written; None stands for all of them.
    What is written is divided by the number of arrays if ``op`` is 'mean'.
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
    """For a plan that moves whole arrays: nothing is gained by putting off the writing."""
    for hop in hops:
        source, own = data[hop.src], data[hop.dst]
        if hop.reduce:
            COMBINE[op](own, source.copyto(own.context), out=own)
        else:
            source.copyto(own)
    if op == "mean":
        for array in data:
            array /= len(data)
