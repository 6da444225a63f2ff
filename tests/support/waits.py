"""Nothing may wait for an array: a law of whatever queues operators."""

import contextlib

import mxnet as mx
import pytest


@contextlib.contextmanager
def refused():
    """Within, reading an array or waiting for it is an error."""

    def refuse(self):
        raise AssertionError("waited")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("wait_to_read", "asnumpy", "asscalar"):
            patch.setattr(mx.nd.NDArray, name, refuse)
        yield
