"""CPU contexts as devices."""

import mxnet as mx


def contexts(k):
    """Return the first ``k`` CPU contexts."""
    return [mx.cpu(i) for i in range(k)]
