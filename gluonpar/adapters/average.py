"""average_gradients: the mean over towers of each variable's gradient."""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar.collectives import Exchange, arguments, in_buckets


def average_gradients(tower_grads: Sequence[Sequence[Any]]) -> list[Any]:
    """Return, per variable, the mean of its gradients over towers, on the first tower's device.

    ``tower_grads[i]`` are tower i's gradients, in the same order of variables for every tower:
    float arrays, ``mx.nd`` or ``mx.np``, or pairs (gradient, variable). Returns a list of new
    arrays, or of pairs (mean, the first tower's variable). In a job of several processes the mean
    is over the towers of all of them. The inputs are not changed; nothing is recorded for autograd,
    and nothing waits. All towers weigh the same, whatever their batches: for
    batches of different sizes use :class:`gluonpar.Towers`, which weighs samples equally.

    Raises ValueError for towers with different numbers of gradients, for shapes or dtypes that
    differ, and for a gradient that is None; TypeError for entries that are not arrays or pairs.

    After ``average_gradients`` in TensorFlow's CIFAR-10 example for several GPUs.

    >>> import mxnet as mx
    >>> towers = [[mx.nd.full((2,), value, ctx=mx.cpu(i))] for i, value in enumerate((1, 4))]
    >>> average_gradients(towers)[0].asnumpy().tolist()
    [2.5, 2.5]
    """
    if not isinstance(tower_grads, (list, tuple)) or not tower_grads:
        raise ValueError(f"tower_grads must hold one list per tower, got {tower_grads!r}")
    lengths = [len(entries) for entries in tower_grads]
    if len(set(lengths)) > 1:
        raise ValueError(f"every tower must have one gradient per variable, got {lengths}")
    pairs = {isinstance(e, (tuple, list)) and len(e) == 2 for each in tower_grads for e in each}
    if len(pairs) > 1:
        raise TypeError("tower_grads must hold either arrays or pairs, got both")
    paired = pairs == {True}
    variables = list(zip(*tower_grads))
    lists = [[entry[0] if paired else entry for entry in entries] for entries in variables]
    for j, grads in enumerate(lists):
        _check(grads, j)
    with autograd.pause(), mx.util.np_shape(True):
        means = [grads[0].copy() for grads in lists]
    if lists:
        ctx = [grad.context for grad in lists[0]]
        exchange = Exchange(ctx, op="mean")
        sums = [[mean, *grads[1:]] for mean, grads in zip(means, lists)]
        exchange.reduce(in_buckets(sums))
    return [(mean, of[0][1]) for mean, of in zip(means, variables)] if paired else means


def _check(grads: Sequence[Any], j: int) -> None:
    without = [i for i, grad in enumerate(grads) if grad is None]
    if without:
        raise ValueError(
            f"variable {j} must have a gradient in every tower, got None in towers {without}; "
            "call attach_grad() on it before forward, or leave it out for every tower"
        )
    different = list({id(grad): grad for grad in grads}.values())  # two may be the same array
    kind = arguments.check_list(different, f"the towers' gradients of variable {j}")
    arguments.check_op("mean", None, kind.dtype)
