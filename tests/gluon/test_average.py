"""average_gradients: the mean over towers, variable by variable, and the inputs untouched."""

import mxnet as mx
import numpy as np
import pytest
import waits
from contexts import device
from mxnet import autograd

from gluonpar.adapters.towers import average_gradients

SHAPES = ((2, 3), (4,), (1,))


def towers(k, dtype="float32", seed=0):
    """k towers' gradients, as NumPy: multiples of 12, whose sums and means are exact."""
    rng = np.random.RandomState(seed)
    return [[12 * rng.randint(-9, 9, size=s).astype(dtype) for s in SHAPES] for _ in range(k)]


def on_devices(world, grads):
    return [
        [world.array(grad, dtype=grad.dtype, ctx=device(i)) for grad in tower]
        for i, tower in enumerate(grads)
    ]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_means_are_those_of_numpy_on_the_first_towers_device(world, k, dtype):
    """The gradients stay as they are, and the means are other arrays."""
    grads = towers(k, dtype)
    arrays = on_devices(world, grads)
    means = average_gradients(arrays)
    assert type(means) is list
    for mean, of_variable in zip(means, zip(*grads)):
        assert type(mean) is type(world.ones((1,)))
        assert mean.context == device(0)
        assert np.dtype(mean.dtype) == dtype
        np.testing.assert_array_equal(mean.asnumpy(), np.mean(of_variable, axis=0))
        mean[:] = -1
    for tower, before in zip(arrays, grads):
        for array, value in zip(tower, before):
            np.testing.assert_array_equal(array.asnumpy(), value)


@pytest.mark.parametrize(("dtype", "value"), [("float16", 60000), ("float32", 3e38)])
def test_means_of_large_gradients_do_not_overflow(world, dtype, value):
    [mean] = average_gradients(on_devices(world, [[np.full((2,), value, dtype)]] * 3))
    np.testing.assert_allclose(mean.asnumpy(), np.full((2,), value, dtype), rtol=1e-6)


@pytest.mark.parametrize("k", [1, 3])
def test_pairs_give_pairs_with_the_first_towers_variables(world, k):
    grads = towers(k)
    variables = on_devices(world, towers(k, seed=1))
    pairs = [list(zip(*tower)) for tower in zip(on_devices(world, grads), variables)]
    averaged = average_gradients(pairs)
    assert [variable for _, variable in averaged] == variables[0]
    assert all(a is b for (_, a), b in zip(averaged, variables[0]))
    for (mean, _), of_variable in zip(averaged, zip(*grads)):
        np.testing.assert_array_equal(mean.asnumpy(), np.mean(of_variable, axis=0))


def test_arrays_of_0_dimensions_need_no_scope():
    with mx.util.np_shape(True):
        arrays = [[mx.nd.full((), 3 * i, ctx=device(i))] for i in range(2)]
    [mean] = average_gradients(arrays)
    with mx.util.np_shape(True):
        assert (mean.shape, mean.asnumpy()) == ((), 1.5)


def test_nothing_waits_and_nothing_is_recorded():
    arrays = on_devices(mx.nd, towers(3))
    arrays[0][0].attach_grad()
    with waits.refused(), autograd.record():
        means = average_gradients(arrays)
    with pytest.raises(mx.MXNetError, match="not in a computational graph"):
        means[0].backward()


def test_no_variables_have_no_means():
    assert average_gradients([[], []]) == []


ONE, TWO = mx.nd.ones((1,)), mx.nd.ones((2,), ctx=device(1))


@pytest.mark.parametrize(
    ("tower_grads", "error", "words"),
    [
        ([], ValueError, r"tower_grads .*got \[\]"),
        (ONE, ValueError, "one list per tower"),
        ([[ONE, ONE], [ONE]], ValueError, r"got \[2, 1\]"),
        ([[ONE, TWO], [ONE, None]], ValueError, r"variable 1 must .*got None in towers \[1\]"),
        ([[(None, ONE)]], ValueError, r"variable 0 must .*got None in towers \[0\]"),
        ([[ONE], [TWO]], ValueError, r"variable 0.*\[1\] on [cg]pu\(1\) .*\(2,\).*\(1,\)"),
        ([[ONE], [ONE.astype("float64")]], ValueError, r"variable 0.*\[1\] .*float64.*float32"),
        ([[ONE], [(ONE, ONE)]], TypeError, "got both"),
        ([[(ONE,)]], TypeError, r"variable 0\[0\] .*got tuple"),
        ([[ONE], [3.0]], TypeError, r"variable 0\[1\] .*got float"),
        ([[ONE.astype("int32")], [ONE.astype("int32")]], ValueError, "float arrays, got int32"),
    ],
)
def test_what_cannot_be_averaged_is_refused(tower_grads, error, words):
    with pytest.raises(error, match=words):
        average_gradients(tower_grads)
