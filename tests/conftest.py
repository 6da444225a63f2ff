"""What all tests share. gluonpar comes before MXNet, whatever module is imported first."""

# ruff: noqa: I001
import gluonpar  # noqa: F401

import mxnet as mx
import pytest


@pytest.fixture(params=["mx.nd", "mx.np"])
def world(request):
    """``mx.nd``, or ``mx.np`` with NumPy's semantics switched on."""
    if request.param == "mx.nd":
        yield mx.nd
        return
    with mx.util.np_shape(True), mx.util.np_array(True):
        yield mx.np
