"""The second half of a sum over everything: inside a process first, then between processes."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx

from gluonpar import cluster
from gluonpar.collectives import broadcast_many, reduce


def summed(grads: Sequence[mx.nd.NDArray], root: int = 0) -> Sequence[mx.nd.NDArray]:
    """Arrays, one or one a device, whose sum is that of ``grads`` over all devices and processes.

    With one process, ``grads`` as they are. With several, ``[grads[root]]``, which has become the
    sum; the others stay. Asynchronous.
    """
    if cluster.size() == 1:
        return grads
    reduce(grads, root)
    cluster.allreduce([grads[root]])
    return [grads[root]]


def complete(
    lists: Sequence[Sequence[mx.nd.NDArray]],
    roots: Sequence[int],
    everywhere: bool,
    compression: str | None = None,
) -> None:
    """Make sums over this process's devices sums over all processes', in place.

    ``lists[j][roots[j]]`` holds such a sum. With ``everywhere`` all arrays of ``lists[j]`` become
    the result. Each is a message of its own, so that the first can go while the last are computed.
    Does nothing if there is one process.
    """
    if cluster.size() == 1:
        return
    for data, root in zip(lists, roots):
        cluster.allreduce([data[root]], compression)
        if everywhere:
            broadcast_many([data], root)
