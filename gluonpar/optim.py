"""Update rules, and their execution: on CPU contexts together with the sum of the gradients.

An all-reduce moves 2 K n bytes of gradients, and then every device updates its own copy: 3 n each.
On CPU contexts all of it is in one memory, so each block of the sum can be used while it is in the
cache (:func:`reduce_update`): gradients are only read, and one update is computed and written to
all copies. That is (2 K + 1) n bytes instead of 5 K n.
"""

from __future__ import annotations

import functools
import itertools
from typing import Callable, Iterable, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import nd

from gluonpar import replicas
from gluonpar.runtime import memory, thread_pool, threads

# multi_sgd_update, and all like it, copy pointers into arrays of this length without checking it.
MOST_WEIGHTS = 60


def sgd(params: Sequence[nd.NDArray], lr: float, batch_size: int) -> None:
    """Update by minibatch SGD, in place: ``param -= lr * param.grad / batch_size``.

    ``params`` are one device's, of any float dtype, whose gradients hold the *sum* over
    ``batch_size`` samples; parameters without a gradient are left as they are. On a CPU context the
    update is one pass over memory (:func:`reduce_update`), a quarter of the time of MXNet's own
    operator; on a GPU it is that operator. Nothing waits, and nothing is checked. ``sgd`` in Dive
    into Deep Learning, 3.4.

    >>> import mxnet as mx
    >>> w = mx.nd.ones((1,)); w.attach_grad(); w.grad[:] = 8
    >>> sgd([w], lr=0.5, batch_size=4)
    >>> w.asscalar()
    0.0
    """
    sgd_on_parts(replicas.parts(params), lr, batch_size)


def sgd_on_parts(parts: Sequence[replicas.Part], lr: float, batch_size: int) -> None:
    """Update by :func:`sgd` one device's parameters in ``parts``, such as its share of buckets."""
    parts = [part for part in parts if part.grad.size]
    params = [param for part in parts for param in part.params]
    if params and on_host(params):
        update = rule(lr, 1.0 / batch_size)
        reduce_update([Item([p.grad], [p.params], [update] * len(p.params)) for p in parts])
        return
    for _, group in memory.by_dtype(params, MOST_WEIGHTS):
        n, pairs = len(group), [array for param in group for array in (param, param.grad)]
        pairs = [array.as_nd_ndarray() for array in pairs]
        options = {"lrs": [lr] * n, "wds": [0.0] * n, "rescale_grad": 1.0 / batch_size}
        nd.multi_sgd_update(*pairs, out=pairs[::2], num_weights=n, **options)


def rule(
    lr: float, rescale_grad: float, wd: float = 0, momentum: float = 0, clip_gradient: float = 0
) -> Callable[..., None]:
    """Return the rule of ``mx.optimizer.SGD``, in place on NumPy blocks (total, param[, momentum]).

    ``total`` is overwritten. ``param -= lr * (clip(rescale_grad * total) + wd * param)``; with
    momentum ``m = momentum * m - lr * (...)``, ``param += m``. As in MXNet, only a positive
    ``clip_gradient`` clips. float32 gets the bits of MXNet's ``multi_sgd_update`` and
    ``multi_sgd_mom_update``: constants are rounded, and terms added, as there.
    """

    def update(total: np.ndarray, param: np.ndarray, state: np.ndarray | None = None) -> None:
        rounded = total.dtype.type
        rate, scale = rounded(lr), rounded(rescale_grad)
        if not clip_gradient or clip_gradient < 0:
            np.multiply(total, rate * scale, out=total)
        else:
            np.multiply(total, scale, out=total)
            np.clip(total, -clip_gradient, clip_gradient, out=total)
            np.multiply(total, rate, out=total)
        decay = (rate * rounded(wd)) * param if wd else None
        if state is None:
            if wd:
                np.add(total, decay, out=total)
            np.subtract(param, total, out=param, casting="same_kind")
            return
        np.multiply(state, momentum, out=state)
        if wd:
            np.subtract(state, decay, out=state, casting="same_kind")
        np.subtract(state, total, out=state, casting="same_kind")
        np.add(param, state, out=param)

    return update


class Item(NamedTuple):
    """Some parameters of all devices, their gradients, and the functions that update them.

    ``grads[k]`` are the gradients of device k's parameters ``params[k]``, end to end. ``updates``
    has one function per parameter: ``update(total, param, *states)`` is given flat NumPy blocks of
    the sum of the gradients, which it may overwrite, and of the first device's parameter and its
    ``states`` (on any CPU context), which it changes in place, element by element.
    """

    grads: Sequence[mx.nd.NDArray]
    params: Sequence[Sequence[mx.nd.NDArray]]
    updates: Sequence[Callable[..., None]]
    states: Sequence[Sequence[mx.nd.NDArray]] | None = None


def on_host(arrays: Iterable[mx.nd.NDArray]) -> bool:
    """Return whether all arrays are in the host's memory."""
    return not any("gpu" in array.context.device_type for array in arrays)


def reduce_update(items: Sequence[Item]) -> None:
    """Update the parameters of every item on all devices by the sum of their gradients, in place.

    The first device's parameters are updated and copied to the others. Gradients are not changed.
    float16 is summed in float32, and ``total`` is then float32. All arrays must be dense and on CPU
    contexts. It is one operator; an error is raised at the next wait for one of the parameters.
    """
    items = [_copied(item) for item in items]  # the caller may change its lists before it runs
    arrays: list[mx.nd.NDArray] = []
    for item in items:
        arrays.extend(itertools.chain(item.grads, *item.params, *(item.states or ())))
    num_bytes = sum(map(memory.num_bytes, arrays))
    max_threads = sum(threads.size(c) for c in {grad.context for grad in items[0].grads})

    def work() -> None:
        tasks = [task for item in items for task in _tasks(item)]
        thread_pool.run(tasks, num_bytes, max_threads)

    thread_pool.push(work, arrays, num_bytes, name="gluonpar.update")


def _copied(item: Item) -> Item:
    states = item.states and [tuple(of_param) for of_param in item.states]
    params = [tuple(of_device) for of_device in item.params]
    return Item(tuple(item.grads), params, tuple(item.updates), states)


def _tasks(item: Item) -> Iterator[tuple[Callable[..., None], list[np.ndarray]]]:
    """Give one task per parameter: the function, and the views that it is called with."""
    grads, start = memory.views(item.grads), 0
    for i, (update, copies) in enumerate(zip(item.updates, zip(*item.params))):
        params = memory.views(copies)
        part = slice(start, start + params[0].size)
        start = part.stop
        states = [memory.view(state) for state in item.states[i]] if item.states else []
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
