"""Carry out an algorithm on arrays on any contexts, asynchronously. A plan runs as MXNet operators.

A chunk that arrives at a device is an array of its own, and so are partial sums; the given arrays
are written once, at the end. MXNet's engine orders operators by the arrays that they read and
write. So it sees only the plan's dependencies, and runs the hops of a step in parallel.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Container, Iterator, NamedTuple, Sequence

import mxnet as mx

from gluonpar.plans import partition, registry
from gluonpar.plans.algorithms import tree
from gluonpar.plans.plan import Hop, by_step, check, made, num_chunks, reverse, towards
from gluonpar.runtime import engine, memory

Lists = Sequence[Sequence[mx.nd.NDArray]]

OPERATORS = {"max": mx.nd.broadcast_maximum, "min": mx.nd.broadcast_minimum}
OPERATORS["sum"] = mx.nd.broadcast_add  # elemwise_add knows no int8 on GPUs


class Executor(NamedTuple):
    """Functions that carry out an algorithm, in place, on lists that hold one array per device.

    ``allreduce(lists, op)`` replaces every array of each list by the list's sum, or its maximum or
    minimum: ``op`` is 'sum', 'max' or 'min'. ``reduce(lists, root, op)`` need replace only device
    ``root``'s. ``broadcast(lists, root)`` replaces every array by device ``root``'s.
    ``refusal(ctx)`` returns why arrays on these contexts cannot be given, or "". ``prepare(lists,
    op)``, if there is one, returns a function that does to these lists what ``allreduce`` does,
    faster. All lists are on the same contexts and of one dtype.
    """

    allreduce: Callable[..., Any]
    reduce: Callable[..., Any]
    broadcast: Callable[..., Any]
    refusal: Callable[[Sequence[mx.Context]], str] = lambda ctx: ""
    prepare: Callable[..., Callable] | None = None


EXECUTORS: dict[str, Executor] = {}
"""The :class:`Executor` of every algorithm without a plan, by name."""


def register_executor(
    name: str,
    reduce: Callable[..., Any] | None = None,
    broadcast: Callable[..., Any] | None = None,
    **functions: Any,
) -> Callable[[Callable], Callable]:
    """Return a decorator that adds an algorithm, the ``allreduce`` of an :class:`Executor`.

    The other arguments are further functions of the executor. Without ``reduce`` a reduce is an
    all-reduce, and without ``broadcast`` a broadcast follows the plan of 'tree'. Raises ValueError
    if the name is registered already.
    """

    def decorate(allreduce: Callable) -> Callable:
        registry.add(name, None)
        to_root = reduce or (lambda lists, root, op: allreduce(lists, op))
        from_root = broadcast or of_plan(tree.plan).broadcast
        EXECUTORS[name] = Executor(allreduce, to_root, from_root, **functions)
        return allreduce

    return decorate


def named(name: str) -> Executor:
    """Return the executor of an algorithm. Raises ValueError, with all names, for others."""
    plan = registry.plan_of(name)
    return EXECUTORS[name] if plan is None else of_plan(plan)


@functools.lru_cache(256)
def of_plan(plan: registry.Plan) -> Executor:
    """Return the executor that carries out the hops of ``plan``.

    A reduce takes the hops on which the root's values depend; a broadcast the same hops in the
    opposite direction. Its functions raise as :func:`gluonpar.plans.plan.check` for a plan that is
    not an all-reduce.
    """

    def allreduce(lists: Lists, op: str) -> None:
        with joined(lists) as whole:
            run(_hops(plan, len(whole)), flattened(whole), op)

    def reduce(lists: Lists, root: int, op: str) -> None:
        with joined(lists, writes=[root]) as whole:
            run(_hops_towards(plan, len(whole), root), flattened(whole), op, root)

    def broadcast(lists: Lists, root: int) -> None:
        k = len(lists[0])
        with joined(lists, [root], [i for i in range(k) if i != root]) as whole:
            run(reverse(_hops_towards(plan, k, root)), flattened(whole))

    return Executor(allreduce, reduce, broadcast)


@functools.lru_cache(256)
def _hops(plan: registry.Plan, num_devices: int) -> list[Hop]:
    """Return the plan's hops, which have been checked."""
    hops = made(plan, num_devices)
    check(hops, num_devices)
    return hops


@functools.lru_cache(256)
def _hops_towards(plan: registry.Plan, num_devices: int, root: int) -> list[Hop]:
    """Return the hops of a reduce to device ``root``: those to device 0, renumbered."""
    k = num_devices
    hops = towards(_hops(plan, k), 0)
    return [hop._replace(src=(hop.src + root) % k, dst=(hop.dst + root) % k) for hop in hops]


@contextlib.contextmanager
def joined(
    lists: Lists, reads: Container[int] | None = None, writes: Container[int] | None = None
) -> Iterator[Sequence[mx.nd.NDArray]]:
    """Give one array per device, with all lists end to end, and copy it back into them on exit.

    ``reads`` are the devices whose values are read, and ``writes`` those whose values change; by
    default all. A single list is given as it is.
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
    hops: Sequence[Hop], data: Sequence[mx.nd.NDArray], op: str = "sum", root: int | None = None
) -> None:
    """Carry out ``hops`` on ``data``, in place; ``data[i]`` is device i's array, flat.

    With ``root`` only that device's array is written.
    """
    size, whole = data[0].size, num_chunks(hops) == 1
    cuts = partition.slices(size, num_chunks(hops))[:size]  # without the empty ones
    chunks = {
        (i, c): array if whole else array[cut]
        for i, array in enumerate(data)
        for c, cut in enumerate(cuts)
    }
    results = {place for place in chunks if root in (None, place[0])}
    in_place = results if whole else set()  # parts of arrays are written once, at the end
    values = dict(chunks)
    for step in by_step([hop for hop in hops if hop.chunk < len(cuts)]):
        changed = {(hop.dst, hop.chunk) for hop in step}
        sent = []
        for hop in step:
            value = values[hop.src, hop.chunk]
            is_written_now = not hop.reduce and (hop.dst, hop.chunk) in in_place
            if not is_written_now or (hop.src, hop.chunk) in changed:
                value = value.copyto(data[hop.dst].context)
            sent.append(value)
        for hop, value in zip(step, sent):
            place = hop.dst, hop.chunk
            own = values[place]
            if hop.reduce:
                # In the order of the devices, so that two that exchange values get the same bits:
                # it matters for NaNs, and for the sign of a maximum of 0.0 and -0.0.
                pair = (value, own) if hop.src < hop.dst else (own, value)
                values[place] = OPERATORS[op](*pair, out=own if place in in_place else value)
            else:
                values[place] = value.copyto(own) if place in in_place else value
    for place in results:
        if values[place] is not chunks[place]:
            values[place].copyto(chunks[place])


def _sum_rows(lists: Lists, op: str) -> None:
    for data in lists:
        total = mx.nd.sparse.add_n(*(array.as_in_context(data[0].context) for array in data))
        for array in data:
            total.copyto(array)


def _copy_rows(lists: Lists, root: int) -> None:
    for data in lists:
        for array in data:
            if array is not data[root]:
                data[root].copyto(array)


ROW_SPARSE = Executor(_sum_rows, lambda lists, root, op: _sum_rows(lists, op), _copy_rows)
"""For row_sparse arrays, such as the gradients of an embedding: the union of their rows, summed.

A row_sparse array holds some rows of a large array, and their indices. Each device has other rows,
so no algorithm on chunks can add such arrays. The rows are copied to the first array's device and
added there, in the order of the list, and the sum is copied to every device. MXNet's kvstore adds
in this order, too, so the results have the same bits. Between processes, every rank receives all
rows, and adds rows with the same index.
"""
