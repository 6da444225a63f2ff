"""host: the arrays of all CPU contexts are computed on in memory, block by block.

CPU contexts share one memory, so nothing has to be sent: NumPy views of the arrays are summed in
place. A block of all K arrays stays in a core's cache from being summed until it has been copied to
every array, so each array crosses the memory bus twice, in and out: 2 K n bytes, the minimum.
Several threads share the blocks of large arrays.

An all-reduce and an update one after the other move 2 K n bytes of gradients, and then 3 K n for
the update of every copy. :func:`update` uses each block of the sum while it is in the cache:
gradients are only read, one update is computed, and it is written to all copies. That is (2 K + 1)
n bytes instead of 5 K n.

Each of these is one operator of MXNet's engine and runs in parallel with the devices' computations.
Arrays are added in the order of the list, starting with the array that becomes the sum.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from gluonpar.collectives.executor import Lists, register_executor
from gluonpar.plans.plan import COMBINE
from gluonpar.runtime import engine, memory, threads


def refusal(ctx: Sequence[mx.Context]) -> str:
    """Return why arrays on these contexts cannot be summed here; "" if they can."""
    for context in ctx:
        if "gpu" in context.device_type:
            return f"must be given CPU contexts only, got {context}, whose memory it cannot read"
    return ""


def on_host(ctx: Sequence[mx.Context]) -> bool:
    """Return whether all arrays on these contexts are in the host's memory."""
    return not refusal(ctx)


def prepare(lists: Lists, op: str) -> Callable[[Lists], None]:
    """Return a function that does :func:`allreduce` to these lists, which it is given, again.

    It keeps no array alive, but views of their memory, which it makes anew where that has moved.
    """
    push, tasks_of, num_bytes = _sum(lists, op)
    memory_now = memory.memory_of([array for data in lists for array in data])
    tasks: list[threads.Task] = []
    memory_then: list[bytes] = []

    def push_sum(lists: Lists) -> None:
        lists = [tuple(data) for data in lists]  # the caller may change its own before it runs

        def work() -> None:
            if memory_now() != memory_then:
                tasks[:] = tasks_of(lists)
                memory_then[:] = memory_now()  # to make a view may allocate it
            threads.run(tasks, num_bytes)

        push(work)

    return push_sum


def _sum(
    lists: Lists,
    op: str,
    sources: Sequence[int] | None = None,
    targets: Sequence[int] | None = None,
) -> tuple[Callable, Callable[[Lists], list[threads.Task]], int]:
    """Return what pushes an operator on the arrays, the tasks that combine them, and their bytes.

    ``sources`` are positions of arrays in a list. These arrays are combined, in this order, into
    the first of them, which is copied to ``targets``. By default all arrays are combined, and the
    result is copied to all.
    """
    devices = range(len(lists[0]))
    sources = devices if sources is None else sources
    positions = (*sources, *(devices[1:] if targets is None else targets))
    combine = functools.partial(_combine, len(sources), op)
    arrays = [array for data in lists for array in data]
    num_bytes = sum(len(data) * memory.num_bytes(data[0]) for data in lists)
    how: dict[str, Any] = {"name": "gluonpar.host", **threads.place(num_bytes)}
    push = engine.prepare(memory.context(arrays[0]), writes=arrays, **how)

    def tasks_of(lists: Lists) -> list[threads.Task]:
        return [(combine, [each[i] for i in positions]) for each in map(memory.views, lists)]

    return push, tasks_of, num_bytes


def _push_sum(lists: Lists, op: str, *positions: Sequence[int]) -> None:
    push, tasks_of, num_bytes = _sum(lists, op, *positions)
    lists = [tuple(data) for data in lists]  # the caller may change its own before it runs
    push(lambda: threads.run(tasks_of(lists), num_bytes))


def reduce(lists: Lists, root: int, op: str) -> None:
    """Sum the arrays of each list into the array on device ``root``, which is the first summand."""
    k = len(lists[0])
    _push_sum(lists, op, [(root + i) % k for i in range(k)], [])


def broadcast(lists: Lists, root: int) -> None:
    """Copy each list's array of device ``root`` to the others."""
    others = [i for i in range(len(lists[0])) if i != root]
    _push_sum(lists, "sum", [root], others)


@register_executor("host", refusal=refusal, prepare=prepare, reduce=reduce, broadcast=broadcast)
def allreduce(lists: Lists, op: str) -> None:
    """Sum the arrays of CPU contexts in memory, block by block, with several threads if large."""
    _push_sum(lists, op)


def _combine(num_sources: int, op: str, *arrays: np.ndarray) -> None:
    """Combine the first ``num_sources`` blocks, in order, into the first; copy it to the rest."""
    result, combine = arrays[0], COMBINE[op]
    for other in arrays[1:num_sources]:
        combine(result, other, out=result)
    for target in arrays[num_sources:]:
        np.copyto(target, result)


class Update(NamedTuple):
    """A parameter on all devices, the gradients to be summed, and the rule that updates it.

    ``rule(total, param, *states)`` is given flat NumPy blocks of the sum of ``grads``, which it
    may overwrite, and of the first of ``params`` and its ``states`` (on any CPU context), which it
    changes in place, element by element.
    """

    grads: Sequence[mx.nd.NDArray]
    params: Sequence[mx.nd.NDArray]
    rule: Callable[..., None]
    states: Sequence[mx.nd.NDArray] = ()


def update(updates: Sequence[Update]) -> None:
    """Update each parameter on all devices by the sum of its gradients, in place.

    The first of ``params`` is updated and copied to the others. Gradients are not changed. float16
    is summed in float32, and ``total`` is then float32. All arrays must be dense and on CPU
    contexts. It is one operator; an error is raised at the next wait for one of the parameters.
    """
    if not updates:
        return
    # The caller may change its lists before it runs.
    updates = [Update(tuple(g), tuple(p), rule, tuple(s)) for g, p, rule, s in updates]
    arrays = [array for each in updates for array in (*each.grads, *each.params, *each.states)]
    num_bytes = sum(
        memory.num_bytes(each.params[0]) * sum(map(len, (each.grads, each.params, each.states)))
        for each in updates
    )
    ctx = memory.context(arrays[0])
    max_threads = sum(threads.size(c) for c in {*map(memory.context, updates[0].params)})

    def work() -> None:
        tasks = []
        for grads, params, rule, states in updates:
            function = functools.partial(_update, len(grads), len(states), rule)
            views = [*memory.views(grads), *map(memory.view, states), *memory.views(params)]
            tasks.append((function, views))
        threads.run(tasks, num_bytes, max_threads)

    sums = any(len(each.grads) > 1 for each in updates)
    name = f"gluonpar.{'allreduce_update' if sums else 'update'}"  # profiles tell them apart
    threads.push(work, ctx, arrays, num_bytes, name)


def _update(num_grads: int, num_states: int, rule: Callable, *arrays: np.ndarray) -> None:
    grads, rest = arrays[:num_grads], arrays[num_grads:]
    states, (param, *copies) = rest[:num_states], rest[num_states:]
    dtype = np.promote_types(grads[0].dtype, "float32")
    if num_grads == 1:
        total = grads[0].astype(dtype)
    else:
        total = np.add(grads[0], grads[1], dtype=dtype)
    for grad in grads[2:]:
        np.add(total, grad, out=total)
    rule(total, param, *states)
    for copy in copies:
        np.copyto(copy, param)


def reduced(
    arrays: Sequence[mx.nd.NDArray], of_block: Callable, of_all: Callable, dtype: str, name: str
) -> mx.nd.NDArray:
    """Return ``of_all([of_block(block), ...])`` of all blocks of ``arrays``, in any order.

    The blocks are flat NumPy arrays, the result an array of shape (1,) on the context of the first
    of ``arrays``, which are dense and on CPU contexts. It is one operator, ``name`` in profiles.
    """
    result = mx.nd.empty((1,), arrays[0].context, dtype)
    num_bytes = sum(map(memory.num_bytes, arrays))

    def work() -> None:
        values: list = []
        tasks = [(lambda b: values.append(of_block(b)), [memory.view(array)]) for array in arrays]
        threads.run(tasks, num_bytes)
        memory.view(result)[0] = of_all(values)

    threads.push(work, result.context, [*arrays, result], num_bytes, name)
    return result
