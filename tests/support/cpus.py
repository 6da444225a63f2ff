"""CPU contexts, which stand for devices."""

import mxnet as mx


def contexts(k):
    """The first ``k`` of them."""
    return [mx.cpu(i) for i in range(k)]
