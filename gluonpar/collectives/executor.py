"""Carry out an algorithm on arrays on any contexts, asynchronously. A plan runs as MXNet operators.

A chunk that arrives at a device is an array of its own, and so are partial sums; the given arrays
are written once, at the end. MXNet's engine orders operators by the arrays that they read and
write. So it sees only the plan's dependencies, and runs the hops of a step in parallel.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Collection, Container, Iterator, Sequence

import mxnet as mx

from gluonpar.plans import Algorithm, Hop, partition, plan, registry
from gluonpar.plans.algorithms import tree
from gluonpar.runtime import engine, memory

Lists = Sequence[Sequence[mx.nd.NDArray]]

OPERATORS = {"max": mx.nd.broadcast_maximum, "min": mx.nd.broadcast_minimum}
OPERATORS["sum"] = mx.nd.broadcast_add  # elemwise_add knows no int8 on GPUs


def allreduce(algorithm: Algorithm, lists: Lists, op: str) -> None:
    """Replace every array of each list of a bucket by the sum of the list, or another ``op``."""
    if algorithm.run is not None:
        algorithm.run(lists, op)
    elif algorithm.plan is not None:
        with joined(lists) as whole:
            run(registry.checked(algorithm.plan, len(whole)), flattened(whole), op)


def reduce(algorithm: Algorithm, lists: Lists, root: int, op: str) -> None:
    """Replace the array of device ``root``, of each list of a bucket, by the sum of the list.

    By the hops of the algorithm's plan on which the root's sum depends. An algorithm that has
    neither a plan nor a reduce gives all devices the sum.
    """
    if algorithm.reduce is not None:
        algorithm.reduce(lists, root, op)
    elif algorithm.plan is None:
        allreduce(algorithm, lists, op)
    else:
        hops = _to_root(algorithm, len(lists[0]), root)
        with joined(lists, writes=[root]) as whole:
            results = [(root, chunk) for chunk in range(plan.num_chunks(hops))]
            run(hops, flattened(whole), op, results)


def broadcast(algorithm: Algorithm, lists: Lists, root: int) -> None:
    """Replace every array of each list of a bucket by the list's array on device ``root``.

    By the hops of :func:`reduce` in the opposite direction, or of a tree.
    """
    if algorithm.broadcast is not None:
        algorithm.broadcast(lists, root)
        return
    k = len(lists[0])
    with joined(lists, [root], [i for i in range(k) if i != root]) as whole:
        run(plan.reverse(_to_root(algorithm, k, root)), flattened(whole))


@functools.lru_cache(256)
def _to_root(algorithm: Algorithm, num_devices: int, root: int) -> list[Hop]:
    """Return the hops of a reduce to ``root``: of the algorithm's plan, or of a tree."""
    hops = registry.checked(algorithm.plan or tree.plan, num_devices)
    return plan.relabel(plan.towards(hops, 0), root, num_devices)


@contextlib.contextmanager
def joined(
    lists: Lists, reads: Container[int] | None = None, writes: Container[int] | None = None
) -> Iterator[Sequence[mx.nd.NDArray]]:
    """Give one array per device, with all lists end to end, and copy it back into them on exit.

    ``reads`` are the devices whose values matter, and ``writes`` the devices whose values change;
    by default all. A single list is given as it is.
    """
    if len(lists) == 1:
        yield lists[0]
        return
    k = len(lists[0])
    flat = flattened([array for data in lists for array in data])
    of_devices = [flat[i::k] for i in range(k)]
    size = sum(array.size for array in of_devices[0])
    whole = [
        mx.nd.concat(*arrays, dim=0)
        if reads is None or i in reads
        else mx.nd.empty((size,), arrays[0].context, arrays[0].dtype)
        for i, arrays in enumerate(of_devices)
    ]
    yield whole
    for i, arrays in enumerate(of_devices):
        if writes is not None and i not in writes:
            continue
        end = 0
        with mx.engine.bulk(len(arrays)):  # one operator; a copyto of each would be one each
            for array in arrays:
                start, end = end, end + array.size
                mx.nd.slice_axis(whole[i], axis=0, begin=start, end=end, out=array)


def flattened(data: Sequence[mx.nd.NDArray]) -> list[mx.nd.NDArray]:
    """Return flat ``mx.nd`` views of ``data``."""
    on_cpu = [array for array in data if memory.context(array).device_type == "cpu"]
    if on_cpu:  # MXNet cannot make views of an array in one of oneDNN's layouts
        reorder = functools.partial(memory.reorder, on_cpu)
        engine.push(reorder, on_cpu[0].context, writes=on_cpu, inline=True)
    return [array.as_nd_ndarray().reshape((-1,)) for array in data]


def run(
    hops: Sequence[Hop], data: Sequence[mx.nd.NDArray], op: str = "sum", results: Collection = ()
) -> None:
    """Carry out ``hops`` on ``data`` in place; ``data[i]`` is device i's array, flat.

    ``results`` holds the (device, chunk) pairs to write; by default, all are written.
    """
    size, whole = data[0].size, plan.num_chunks(hops) == 1
    cuts = partition.slices(size, plan.num_chunks(hops))[:size]  # without the empty ones
    chunks = {
        (i, c): array if whole else array[cut]
        for i, array in enumerate(data)
        for c, cut in enumerate(cuts)
    }
    results = results or chunks
    # A plan of whole arrays gains nothing from writing at the end.
    written_now = {place for place in chunks if whole and place in results}
    values = dict(chunks)
    for step in plan.by_step([hop for hop in hops if hop.chunk < len(cuts)]):
        changed = {(hop.dst, hop.chunk) for hop in step}
        sent = []
        for hop in step:
            place, value = (hop.src, hop.chunk), values[hop.src, hop.chunk]
            if hop.reduce or place in changed or (hop.dst, hop.chunk) not in written_now:
                value = value.copyto(data[hop.dst].context)
            sent.append(value)
        for hop, value in zip(step, sent):
            place = hop.dst, hop.chunk
            own = values[place]
            if hop.reduce:
                # In the order of the devices, so that two that exchange values get the same bits:
                # it matters for NaNs, and for the sign of a maximum of 0.0 and -0.0.
                pair = (value, own) if hop.src < hop.dst else (own, value)
                values[place] = OPERATORS[op](*pair, out=own if place in written_now else value)
            else:
                values[place] = value.copyto(own) if place in written_now else value
    for place in results:
        if place in chunks and values[place] is not chunks[place]:
            values[place].copyto(chunks[place])
