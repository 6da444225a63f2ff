"""How many bytes of a CPU device the arrays of this process hold, and what they are for."""

from __future__ import annotations

import gc
from typing import Iterable, Sequence

import mxnet as mx

from gluonpar.runtime import memory


def by_purpose(params: Sequence[mx.nd.NDArray], ctx: mx.Context) -> dict[str, int]:
    """Bytes of one device's "parameters", their "gradients", and of all "others" alive on it.

    Memory that several arrays share, such as a flat buffer and the parameters in it, counts once,
    for what it was asked for first. Counted are arrays that Python knows of: the workspaces of
    MXNet's operators are not among them. Nothing may be running. A GPU's memory has no address to
    compare by; there, sizes are summed, and "others" left out.
    """
    grads = [param.grad for param in params if param.grad is not None]
    if ctx.device_type != "cpu":
        sums = [sum(map(memory.num_bytes, arrays)) for arrays in (params, grads)]
        return dict(zip(("parameters", "gradients"), sums))
    covered = [distinct(params), distinct([*params, *grads])]
    covered.append(distinct([*params, *grads, *alive(ctx)]))
    differences = [after - before for before, after in zip([0, *covered], covered)]
    return dict(zip(("parameters", "gradients", "others"), differences))


def alive(ctx: mx.Context) -> list[mx.nd.NDArray]:
    """All dense arrays on ``ctx`` that Python can reach; undoes ``gc.freeze``."""
    gc.unfreeze()
    gc.collect()
    arrays = [each for each in gc.get_objects() if issubclass(type(each), mx.nd.NDArray)]
    return [each for each in arrays if each.stype == "default" and each.context == ctx]


def distinct(arrays: Iterable[mx.nd.NDArray]) -> int:
    """Bytes of memory that any of ``arrays`` lies on: that of an array and its views once.

    >>> whole = mx.nd.zeros((4,))
    >>> distinct([whole[:3], whole[2:]])
    16
    """
    views = [memory.view(array) for array in arrays if array.size]
    total = end = 0
    for start, num_bytes in sorted((view.ctypes.data, view.nbytes) for view in views):
        total += max(0, start + num_bytes - max(start, end))
        end = max(end, start + num_bytes)
    return total
