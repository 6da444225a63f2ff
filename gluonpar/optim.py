"""Update rules, and their execution: on CPU contexts together with the sum of the gradients.

An all-reduce moves 2 K n bytes of gradients, and then every device updates its own copy: 3 n each.
On CPU contexts all of it is in one memory, so each block of the sum can be used while it is in the
cache (:func:`reduce_update`): gradients are only read, and one update is computed and written to
all copies. That is (2 K + 1) n bytes instead of 5 K n.
"""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from gluonpar import replicas
from gluonpar.collectives import Exchange
from gluonpar.runtime import memory, threads

# multi_sgd_update, and all like it, copy pointers into arrays of this length without checking it.
MOST_WEIGHTS = 60


def sgd(params: Sequence[nd.NDArray], lr: float, batch_size: int) -> None:
    """Update by minibatch SGD, in place: ``param -= lr * param.grad / batch_size``.

    ``params`` are one device's, of any float dtype, whose gradients hold the *sum* over
    ``batch_size`` samples; parameters without a gradient are left as they are. On a CPU context the
    update is one pass over memory (:func:`update_on_host`), a quarter of the time of MXNet's own
    operator; on a GPU it is that operator. Nothing waits. Raises ValueError, with nothing changed,
    unless ``lr`` is finite and ``batch_size`` positive and finite. ``sgd`` in Dive into Deep
    Learning, 3.4.

    >>> import mxnet as mx
    >>> w = mx.nd.ones((1,)); w.attach_grad(); w.grad[:] = 8
    >>> sgd([w], lr=0.5, batch_size=4)
    >>> float(w.asscalar())
    0.0
    """
    if not _is_finite(lr):
        raise ValueError(f"lr must be a finite number, got {lr!r}; try 0.2")
    batch_size = check_batch_size(batch_size)
    params = params if isinstance(params, list) else list(params)
    update_by_sgd(replicas.buckets([params]), lr, batch_size)


def check_lr(lr: float) -> None:
    """Raise ValueError unless the learning rate is a positive finite number."""
    if not _is_finite(lr) or not lr > 0:
        raise ValueError(f"lr must be a positive finite number, got {lr!r}; try 0.2")


def _is_finite(lr: float) -> bool:
    largest = float(np.finfo("float32").max)  # a Python float: no warning of overflow
    return isinstance(lr, (numbers.Real, np.ndarray)) and -largest <= lr <= largest


def check_batch_size(batch_size: Any) -> Any:
    """Return the number of samples, which may be fractional (a weight); read an array of one.

    Raises ValueError unless it is a positive finite number.
    """
    if isinstance(batch_size, mx.nd.NDArray) and batch_size.size == 1:
        batch_size = batch_size.asnumpy()
    if isinstance(batch_size, np.ndarray) and batch_size.size == 1:
        batch_size = batch_size.item()
    if not isinstance(batch_size, (numbers.Real, np.number)) or not 0 < batch_size < math.inf:
        raise ValueError(f"batch_size must be a positive finite number, got {batch_size!r}")
    return batch_size


def update_by_sgd(buckets: Sequence[replicas.ParamBucket], lr: float, batch_size: int) -> None:
    """Update by :func:`sgd` the parameters in ``buckets``, each copy by its own gradient."""
    update, copies = rule(lr, 1.0 / batch_size), [each for b in buckets for each in b.copies]
    for k in range(len(copies[0].params) if copies else 0):
        if on_host([copies[0].params[k]]):  # in one operator
            update_on_host([Item([each.grads[k]], [each.params[k]], update) for each in copies])
            continue
        for bucket in buckets:
            pairs = [(each.params[k], each.grads[k]) for each in bucket.copies]
            for start in range(0, len(pairs), MOST_WEIGHTS):
                _multi_sgd_update(pairs[start : start + MOST_WEIGHTS], lr, batch_size)


def _multi_sgd_update(pairs: Sequence[tuple], lr: float, batch_size: int) -> None:
    """One operator, which autograd does not record."""
    n, arrays = len(pairs), [array.as_nd_ndarray() for pair in pairs for array in pair]
    options = {"lrs": [lr] * n, "wds": [0.0] * n, "rescale_grad": 1.0 / batch_size}
    with autograd.pause():
        nd.multi_sgd_update(*arrays, out=arrays[::2], num_weights=n, **options)


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
    """A parameter on all devices, the gradients to be summed, and the function that updates it.

    ``update(total, param, *states)`` is given flat NumPy blocks of the sum of ``grads``, which it
    may overwrite, and of the first of ``params`` and its ``states`` (on any CPU context), which it
    changes in place, element by element.
    """

    grads: Sequence[mx.nd.NDArray]
    params: Sequence[mx.nd.NDArray]
    update: Callable[..., None]
    states: Sequence[mx.nd.NDArray] = ()


def on_host(arrays: Iterable[mx.nd.NDArray]) -> bool:
    """Return whether all arrays are in the host's memory."""
    return not any("gpu" in array.context.device_type for array in arrays)


def reduce_update(
    exchange: Exchange,
    buckets: Sequence[replicas.ParamBucket],
    rule_of: Callable[[replicas.Copies], tuple],
) -> None:
    """Sum the gradients in ``buckets`` over all devices, and update all copies of the parameters.

    On CPU contexts, for an exchange that :attr:`~Exchange.may_fuse`. In one process the sum and the
    update are one pass over memory. With several the sums must be on each bucket's root already.
    ``rule_of(copies)`` returns the function that updates a parameter and the states that it is
    given, as in :class:`Item`.
    """
    alone = exchange.num_processes == 1
    for bucket in buckets:
        items = [
            Item(each.counting if alone else [each.grads[bucket.root]], each.params, *rule_of(each))
            for each in bucket.copies
        ]
        update_on_host([item for item in items if item.grads])


def update_on_host(items: Sequence[Item]) -> None:
    """Update the parameter of every item on all devices by the sum of its gradients, in place.

    The first of ``params`` is updated and copied to the others. Gradients are not changed. float16
    is summed in float32, and ``total`` is then float32. All arrays must be dense and on CPU
    contexts. It is one operator; an error is raised at the next wait for one of the parameters.
    """
    if not items:
        return
    # The caller may change its lists before it runs.
    items = [
        Item(tuple(grads), tuple(params), update, tuple(states))
        for grads, params, update, states in items
    ]
    arrays = [array for item in items for array in (*item.grads, *item.params, *item.states)]
    num_bytes = sum(
        memory.num_bytes(item.params[0]) * sum(map(len, (item.grads, item.params, item.states)))
        for item in items
    )
    max_threads = sum(threads.size(c) for c in {*map(memory.context, items[0].params)})

    def work() -> None:
        tasks = []
        for grads, params, update, states in items:
            function = functools.partial(_update, len(grads), len(states), update)
            views = [*memory.views(grads), *map(memory.view, states), *memory.views(params)]
            tasks.append((function, views))
        threads.run(tasks, num_bytes, max_threads)

    sums = any(len(item.grads) > 1 for item in items)
    name = f"gluonpar.{'allreduce_update' if sums else 'update'}"  # profiles tell them apart
    threads.push(work, arrays, num_bytes, name)


def reduced_on_host(
    arrays: Sequence[mx.nd.NDArray], of_block: Callable, of_all: Callable, dtype: str, name: str
) -> mx.nd.NDArray:
    """Return ``of_all([of_block(block), ...])`` of all blocks of ``arrays``, in any order.

    The blocks are flat NumPy arrays, the result an array of shape (1,) on the context of the first
    of ``arrays``, which are dense and on CPU contexts. It is one operator, ``name`` in profiles.
    """
    result, num_bytes = nd.empty((1,), arrays[0].context, dtype), sum(map(memory.num_bytes, arrays))

    def work() -> None:
        values: list = []

        def add(block: np.ndarray) -> None:
            values.append(of_block(block))

        threads.run([(add, [memory.view(array)]) for array in arrays], num_bytes)
        memory.view(result)[0] = of_all(values)

    threads.push(work, [*arrays, result], num_bytes, name)
    return result


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
