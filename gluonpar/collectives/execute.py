"""A plan carried out with MXNet's own operators, on any contexts. Everything is asynchronous."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx

from gluonpar.collectives.plan import Hop


def run(hops: Sequence[Hop], data: Sequence[mx.nd.NDArray]) -> None:
    """Carry out ``hops`` on ``data``, in place: ``data[i]`` is device i's array."""
    for hop in hops:
        source, target = data[hop.src], data[hop.dst]
        if hop.reduce:
            target += source.copyto(target.context)
        else:
            source.copyto(target)
