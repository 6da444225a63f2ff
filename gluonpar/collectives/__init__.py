"""Sums and copies over lists of arrays, one a device; nothing of models or learning rates."""

from __future__ import annotations

from typing import Callable, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar import threads
from gluonpar.collectives import execute, star
from gluonpar.collectives.plan import Hop

ALGORITHMS: dict[str, Callable[[int], list[Hop]]] = {"star": star.plan}
DEFAULT = "star"


def allreduce(data: Sequence[mx.nd.NDArray], algorithm: str | None = None) -> None:
    """Replace every array of ``data`` by the sum of all of them, in place.

    ``data`` holds one array a device: any number, of one shape, one dtype (float or integer) and
    dense storage, ``mx.nd`` or ``mx.np``, each on its own context or several on one. ``algorithm``
    is a name of :data:`ALGORITHMS`; None picks one. All arrays end with the same bits. Returns None
    at once, as any operator does; MXNet's engine orders it against all other operators on these
    arrays. Nothing is recorded for autograd.

    Raises ValueError for an empty list, different shapes, dtypes or storage types, and an unknown
    algorithm; TypeError for what is no MXNet array. From ``allreduce`` in Dive into Deep Learning,
    13.5.4.

    >>> import mxnet as mx
    >>> data = [mx.nd.ones((2,), ctx=mx.cpu(0)), mx.nd.ones((2,), ctx=mx.cpu(1)) * 2]
    >>> allreduce(data)
    >>> [array.asnumpy().tolist() for array in data]
    [[3.0, 3.0], [3.0, 3.0]]
    """
    plan = algorithm_named(algorithm or DEFAULT)
    _check(data)
    threads.share([array.context for array in data])
    with autograd.pause():
        execute.run(plan(len(data)), data)


def broadcast(data: Sequence[mx.nd.NDArray], root: int = 0) -> None:
    """Replace every array of ``data`` by ``data[root]``, in place; otherwise as :func:`allreduce`.

    >>> import mxnet as mx
    >>> data = [mx.nd.zeros((2,), ctx=mx.cpu(0)), mx.nd.ones((2,), ctx=mx.cpu(1))]
    >>> broadcast(data, root=1)
    >>> data[0].asnumpy().tolist()
    [1.0, 1.0]
    """
    _check(data)
    if not 0 <= root < len(data):
        raise ValueError(f"root={root} is none of the {len(data)} arrays; use 0 to {len(data) - 1}")
    with autograd.pause():
        for i, array in enumerate(data):
            if i != root:
                data[root].copyto(array)


def algorithm_named(name: str) -> Callable[[int], list[Hop]]:
    """The plan of the algorithm ``name``; ValueError, with the names there are, for another."""
    if name not in ALGORITHMS:
        raise ValueError(f"no all-reduce algorithm {name!r}; there are: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def _check(data: Sequence[mx.nd.NDArray]) -> None:
    if not isinstance(data, (list, tuple)):
        raise TypeError(f"data is a {type(data).__name__}; pass a list of arrays, one a device")
    if not data:
        raise ValueError("data is an empty list; pass one array a device")
    for i, array in enumerate(data):
        if not isinstance(array, mx.nd.NDArray):
            raise TypeError(f"data[{i}] is a {type(array).__name__}, not an MXNet array")
        for what in ("shape", "dtype", "stype"):
            here, first = getattr(array, what), getattr(data[0], what)
            if here != first:
                raise ValueError(
                    f"data[{i}] on {array.context} has {what} {_name(here)}, but data[0] on "
                    f"{data[0].context} has {_name(first)}; all must be alike to be combined"
                )
    if data[0].stype != "default":
        raise ValueError(
            f"data holds {data[0].stype} arrays; call tostype('default') on each first"
        )


def _name(value: object) -> str:
    return getattr(value, "__name__", str(value))
