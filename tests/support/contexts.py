"""The devices of the tests: CPU contexts, or with ``--device gpu-sim`` simulated GPUs."""

import mxnet as mx

from gluonpar import collectives

kind = mx.cpu  # set by conftest.py before the tests are imported


def device(i=0):
    return kind(i)


def contexts(k):
    return [kind(i) for i in range(k)]


def unused():
    """Return contexts of devices that no other test uses."""
    return [kind(41), kind(42)] if kind is mx.cpu else [kind(8)]


def algorithms():
    """Return the names of the all-reduce algorithms that these devices can use."""
    return sorted(collectives.usable([device()]))
