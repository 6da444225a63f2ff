"""Sum, update, broadcast in one pass over the host's memory: an all-reduce that stores no sum.

After an all-reduce every device updates its copy of the same parameters with the same sum: 2 K n
bytes of gradients in and out, then 3 n a device. On CPU contexts all of it lies in one memory, so
each block of the sum can be used while it is in the cache: gradients are only read, one update is
computed, and its result is written to all copies. That is (2 K + 1) n bytes, and the update once
instead of K times.
"""

from __future__ import annotations

import functools
from typing import Callable, Sequence

import mxnet as mx
import numpy as np

from gluonpar import memory, threads
from gluonpar.collectives import blocks, host


def possible(arrays: Sequence[mx.nd.NDArray]) -> bool:
    """Whether all arrays are in the host's memory."""
    return not any("gpu" in array.context.device_type for array in arrays)


def reduce_update(
    lists: Sequence[tuple[Sequence[mx.nd.NDArray], Sequence[mx.nd.NDArray]]],
    update: Callable[..., None],
    states: Sequence[Sequence[mx.nd.NDArray]] | None = None,
) -> None:
    """For each (grads, params) of ``lists``, one array a device: update by the sum of ``grads``.

    ``update(total, param, *state)`` gets flat NumPy blocks: the sum, which it may overwrite, and
    the block of ``params[0]``, and of each array of the list's ``states``, which it changes in
    place, element by element. The new ``params[0]`` is copied to the other params, so all have the
    same bits. Gradients stay what each device computed. float16 is summed in float32, and
    ``total`` is then float32.

    All arrays of a list are of one size, dense and on CPU contexts. One operator of MXNet's engine
    does it all; errors are raised where a parameter is next waited for.
    """
    states = states or [()] * len(lists)
    arrays = [
        array for (grads, params), more in zip(lists, states) for array in (*grads, *params, *more)
    ]
    num_bytes = sum(map(memory.num_bytes, arrays))
    most_threads = sum(threads.size(c) for c in {param.context for param in lists[0][1]})
    work = functools.partial(_work, lists, states, update, num_bytes, most_threads)
    host.push(work, arrays, num_bytes, name="gluonpar.update")


def _work(lists, states, update, num_bytes: int, most_threads: int) -> None:
    tasks = []
    for (grads, params), more in zip(lists, states):
        function = functools.partial(_update, len(grads), len(more), update)
        arrays = [memory.view(array) for array in (*grads, *more, *params)]
        tasks.append((function, arrays))
    blocks.work(tasks, num_bytes, most_threads)


def _update(num_grads: int, num_states: int, update, *arrays: np.ndarray) -> None:
    grads, rest = arrays[:num_grads], arrays[num_grads:]
    state, (param, *copies) = rest[:num_states], rest[num_states:]
    dtype = np.promote_types(grads[0].dtype, "float32")
    if num_grads == 1:
        total = grads[0].astype(dtype)
    else:
        total = np.add(grads[0], grads[1], dtype=dtype)
    for grad in grads[2:]:
        np.add(total, grad, out=total)
    update(total, param, *state)
    for copy in copies:
        np.copyto(copy, param)
