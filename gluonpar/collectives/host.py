"""host: one function sums the arrays of all CPU contexts in memory, block by block.

CPU contexts share one memory, so nothing has to be sent: NumPy views of the arrays are summed in
place. A block of all K arrays stays in a core's cache from being summed until it has been copied to
every array, so each array crosses the memory bus twice, in and out: 2 K n bytes, the minimum.
Several threads share the blocks of large arrays.

The function is an operator of MXNet's engine and runs in parallel with the devices' computations.
Arrays are added in the order of the list, starting with the one that the sum is written to.
"""

from __future__ import annotations

import functools
from typing import Callable, Sequence, Tuple

import mxnet as mx
import numpy as np

from gluonpar.plans import register_executor
from gluonpar.runtime import engine, memory, threads

Lists = Sequence[Sequence[mx.nd.NDArray]]
# (part, sources, targets): a slice of the flattened arrays, and positions of arrays in a list. The
# sources' parts are added in this order into the first of them, which is copied to the targets.
Reduction = Tuple[slice, Sequence[int], Sequence[int]]
_WHOLE = slice(None)
COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def refusal(ctx: Sequence[mx.Context]) -> str:
    """Return why arrays on these contexts cannot be summed here; "" if they can."""
    gpus = [context for context in ctx if "gpu" in context.device_type]
    reason = "must be given CPU contexts only, got {}, whose memory the host cannot read"
    return reason.format(gpus[0]) if gpus else ""


def starting_with(i: int, num_devices: int) -> list[int]:
    """Return the positions of all devices in turn, from ``i`` on."""
    return [(i + j) % num_devices for j in range(num_devices)]


def reduce(lists: Lists, root: int, op: str) -> None:
    """Sum the arrays of each list into that of device ``root``."""
    run(lists, [(_WHOLE, starting_with(root, len(lists[0])), [])], op)


def broadcast(lists: Lists, root: int) -> None:
    """Copy each list's array of device ``root`` to the others."""
    _, *others = starting_with(root, len(lists[0]))
    run(lists, [(_WHOLE, [root], others)])


def prepare(
    lists: Lists, op: str, reductions: Sequence[Reduction] | None = None
) -> Callable[[Lists], None]:
    """Return a function that pushes one operator that does ``reductions`` on each of these lists.

    By default these are :func:`allreduce`'s. The function keeps no array alive: it is given them.
    """
    devices = range(len(lists[0]))
    reductions = reductions or [(_WHOLE, devices, devices[1:])]
    arrays = [array for data in lists for array in data]
    num_bytes = sum(len(data) * memory.num_bytes(data[0]) for data in lists)
    tasks_of_list = [
        (part, functools.partial(_combine, len(sources), op), (*sources, *targets))
        for part, sources, targets in reductions
    ]
    how = {"writes": arrays, "name": "gluonpar.host", **threads.place(num_bytes)}
    push = engine.prepare(memory.context(arrays[0]), **how)

    def push_sum(lists: Lists) -> None:
        lists = [tuple(data) for data in lists]  # the caller may change its own before it runs
        push(functools.partial(_reduce, lists, tasks_of_list, num_bytes))

    return push_sum


@register_executor("host", refusal, prepare=prepare, reduce=reduce, broadcast=broadcast)
def allreduce(lists: Lists, op: str) -> None:
    """Sum the arrays of CPU contexts in memory, block by block, with several threads if large."""
    prepare(lists, op)(lists)


def run(lists: Lists, reductions: Sequence[Reduction], op: str = "sum") -> None:
    """Do ``reductions`` on each of ``lists``, in one operator."""
    prepare(lists, op, reductions)(lists)


def _reduce(lists, tasks_of_list, num_bytes: int) -> None:
    tasks = []
    for data in lists:
        views = memory.views(data)
        for part, function, positions in tasks_of_list:
            of_devices = views if part == _WHOLE else [view[part] for view in views]
            tasks.append((function, [of_devices[i] for i in positions]))
    threads.run(tasks, num_bytes)


def _combine(num_sources: int, op: str, *arrays: np.ndarray) -> None:
    """Combine the first ``num_sources`` blocks, in order, into the first; copy it to the rest."""
    result, combine = arrays[0], COMBINE[op]
    for other in arrays[1:num_sources]:
        combine(result, other, result)
    for target in arrays[num_sources:]:
        np.copyto(target, result)
