"""global_norm and clip_global_norm: right wherever the elements are finite, in every dtype."""

import mxnet as mx
import numpy as np
import pytest
from contexts import device

from gluonpar.gluon import clipping

LARGE_AND_SMALL = [("float16", 6e4), ("float32", 1e38), ("float64", 1e300)]
LARGE_AND_SMALL += [("float16", 1e-7), ("float32", 1e-38), ("float64", 1e-300)]


@pytest.mark.parametrize(("dtype", "value"), LARGE_AND_SMALL)
def test_squares_neither_overflow_nor_vanish(world, dtype, value):
    """Nine elements of one value, in two arrays: the norm is three times the value."""
    shapes = [(2, 2), (5,)]
    arrays = [world.full(shape, value, dtype=dtype, ctx=device()) for shape in shapes]
    one = float(arrays[1].asnumpy()[0])
    assert float(clipping.global_norm(arrays).asscalar()) == pytest.approx(3 * one, rel=1e-6)


def test_all_arrays_are_scaled_to_the_norm_or_left():
    given = [np.arange(1.0, 7.0).reshape(2, 3), np.arange(7.0, 11.0)]
    norm = np.sqrt(sum((values**2).sum() for values in given))
    for max_norm, factor in ((norm / 4, 0.25), (2 * norm, 1.0)):
        arrays = [mx.nd.array(values, ctx=device()) for values in given]
        before = clipping.clip_global_norm(arrays, max_norm)
        assert before.asscalar() == pytest.approx(norm, rel=1e-7)
        for array, values in zip(arrays, given):
            np.testing.assert_allclose(array.asnumpy(), values * factor, rtol=1e-6)
