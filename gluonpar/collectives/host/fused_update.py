"""Sum, update, broadcast in one pass over the host's memory: an all-reduce that stores no sum.

After an all-reduce every device updates its copy of the same parameters with the same sum: 2 K n
bytes of gradients in and out, then 3 n a device. On CPU contexts all of it lies in one memory, so
each block of the sum can be used while it is in the cache: gradients are only read, one update is
computed, and its result is written to all copies. That is (2 K + 1) n bytes, and the update once
instead of K times.
"""

from __future__ import annotations

import functools
import itertools
from typing import Callable, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from gluonpar.collectives.host import reduction, thread_pool
from gluonpar.runtime import memory, threads


class Item(NamedTuple):
    """Parameters of all devices, their gradients, and what makes new parameters of old.

    ``grads`` has one array a device, the gradients of its parameters end to end; ``params[k]`` are
    device k's parameters. ``updates`` has a function for each of these: ``update(total, param,
    *states)`` gets flat NumPy blocks, the sum of its gradients, which it may overwrite, and blocks
    of the first device's parameter and of its ``states`` (on any CPU context), which it changes in
    place, element by element.
    """

    grads: Sequence[mx.nd.NDArray]
    params: Sequence[Sequence[mx.nd.NDArray]]
    updates: Sequence[Callable[..., None]]
    states: Sequence[Sequence[mx.nd.NDArray]] | None = None

    @property
    def arrays(self) -> list[mx.nd.NDArray]:
        """All there are."""
        return [*self.grads, *itertools.chain(*self.params, *(self.states or ()))]

    def snapshot(self) -> Item:
        """The same, in lists that nobody else has."""
        states = self.states and [tuple(of_param) for of_param in self.states]
        params = [tuple(of_device) for of_device in self.params]
        return Item(tuple(self.grads), params, tuple(self.updates), states)


def possible(arrays: Sequence[mx.nd.NDArray]) -> bool:
    """Whether all arrays are in the host's memory."""
    return not any("gpu" in array.context.device_type for array in arrays)


def reduce_update(items: Sequence[Item]) -> None:
    """Update the parameters of every item by the sum of their gradients, on all devices.

    The first device's are updated and copied to the others, so all have the same bits. Gradients
    stay what each device computed. float16 is summed in float32, and ``total`` is then float32. All
    arrays are dense and on CPU contexts. One operator of MXNet's engine does it all; errors are
    raised where a parameter is next waited for.
    """
    items = [item.snapshot() for item in items]  # the caller may change its lists by then
    arrays = [array for item in items for array in item.arrays]
    num_bytes = sum(map(memory.num_bytes, arrays))
    most_threads = sum(threads.size(c) for c in {grad.context for grad in items[0].grads})
    work = functools.partial(_work, items, num_bytes, most_threads)
    reduction.push(work, arrays, num_bytes, name="gluonpar.update")


def _work(items: Sequence[Item], num_bytes: int, most_threads: int) -> None:
    tasks = [task for item in items for task in _tasks(item)]
    thread_pool.work(tasks, num_bytes, most_threads)


def _tasks(item: Item) -> Iterator[tuple[Callable[..., None], list[np.ndarray]]]:
    """One a parameter."""
    grads, start = memory.views(item.grads), 0
    for i, (update, copies) in enumerate(zip(item.updates, zip(*item.params))):
        part = slice(start, start + copies[0].size)
        start = part.stop
        if not copies[0].size:  # MXNet gives it no memory
            continue
        states = [memory.view(state) for state in item.states[i]] if item.states else []
        params = memory.views(copies)
        function = functools.partial(_update, len(grads), len(states), update)
        yield function, [*(grad[part] for grad in grads), *states, *params]


def _update(num_grads: int, num_states: int, update, *arrays: np.ndarray) -> None:
    grads, rest = arrays[:num_grads], arrays[num_grads:]
    states, (param, *copies) = rest[:num_states], rest[num_states:]
    dtype = np.promote_types(grads[0].dtype, "float32")
    if num_grads == 1:
        total = grads[0].astype(dtype)
    else:
        total = np.add(grads[0], grads[1], dtype=dtype)
    for grad in grads[2:]:
        np.add(total, grad, out=total)
    update(total, param, *states)
    for copy in copies:
        np.copyto(copy, param)
