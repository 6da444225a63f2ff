"""metrics: every sample counts once, and the first loss that is no number is found."""

import re

import numpy as np
import pytest
from mxnet import autograd, nd

from gluonpar.metrics import Diverged, LossMeter, accuracy
from tests.support.contexts import contexts, device
from tests.support.processes import run_python

NUM_CLASSES = 5


def losses(*shards):
    return [nd.array(shard, ctx=device(i)) for i, shard in enumerate(shards)]


def test_the_mean_is_over_samples_not_over_shards_or_batches():
    meter = LossMeter()
    meter.add(losses([1, 2, 4], [8, 16]))
    meter.add(losses([32]))
    assert meter.read() == 63 / 6


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("device", [0, 1])
def test_the_first_batch_that_is_not_finite_is_named(bad, batch, device):
    """Batches are numbered across reads."""
    meter = LossMeter()
    for number in range(1, 6):
        shards = [[1.0, 2.0], [3.0]]
        if number >= batch:
            shards[device][0] = float(bad)
        elif number == 3:
            meter.read()
        meter.add(losses(*shards))
    name = re.escape(str(contexts(2)[device]))
    with pytest.raises(Diverged, match=f"{name} became {bad} in batch {batch}$"):
        meter.read()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int64"])
def test_losses_of_any_dtype_are_added_without_overflow(world, dtype):
    """1,000 times 100; float32 cannot hold the sum of two of 3e38."""
    largest = {"float16": 60000, "float32": 3e38, "float64": 1e300}.get(dtype, 100)
    meter = LossMeter()
    meter.add([world.full((1000,), 100, dtype=dtype, ctx=device())])
    assert meter.read() == 100
    meter = LossMeter()
    meter.add([world.full((n,), largest, dtype=dtype, ctx=device(i)) for i, n in enumerate((9, 8))])
    assert meter.read() == pytest.approx(largest, rel=1e-3)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 3), (4, 2, 3)])
def test_a_sample_counts_once_however_many_values_its_loss_has(world, shape):
    meter = LossMeter()
    meter.add([world.ones(shape, ctx=device(0)) * 7, world.ones((1,), ctx=device(1)) * 2])
    assert meter.read() == (4 * 7 + 2) / 5
    assert meter.num_samples == 5


MANY = """
import itertools
import gluonpar, mxnet as mx
from gluonpar import metrics

values = [metrics.all_finite([]).asscalar()]
kinds = itertools.cycle(("float32", "float16", "float64"))
for number in (200, 201, 1000):
    arrays = [mx.nd.ones((3,), dtype=next(kinds)) for _ in range(number)]
    values.append(metrics.all_finite([*arrays, mx.nd.ones((1,), dtype="int32")]).asscalar())
    for bad in (0, 199, number - 1):
        arrays[bad][2] = float("inf")
        values.append(metrics.all_finite(arrays).asscalar())
        arrays[bad][2] = 1
with mx.util.np_shape(True), mx.util.np_array(True):
    for arrays in ([mx.np.ones((0, 3))], [mx.np.ones((0,)), mx.np.array(float("nan"))]):
        values.append(metrics.all_finite(arrays).asscalar())
meter = metrics.LossMeter()
meter.add([mx.nd.ones((2,))], [mx.nd.ones((3,)) for _ in range(600)])
print([*map(int, values), meter.read()])
"""


def test_all_finite_takes_any_number_of_arrays_also_none_and_empty_ones():
    """In a process of its own, as more than 200, and none, ended it."""
    printed = run_python(MANY, MALLOC_PERTURB_="165")
    assert printed == f"{[1, *[1, 0, 0, 0] * 3, 1, 0, 1.0]}\n"


def toy(X, params):
    """Scores are a linear function of the four features."""
    return nd.dot(X.astype("float32"), params[0])


def toy_data(n):
    """Bytes as features, a label each, integer weights: all scores are exact in float32."""
    rng = np.random.RandomState(n)
    images = rng.randint(0, 256, size=(n, 4)).astype("uint8")
    labels = rng.randint(0, NUM_CLASSES, size=n).astype("uint8")
    weights = rng.randint(-9, 10, size=(4, NUM_CLASSES)).astype("float32")
    # Make four in five right, and the first and last sample right and wrong, so that neither
    # counting a sample twice nor leaving one out keeps the share.
    right = (images @ weights).argmax(axis=1)
    labels = np.where(rng.rand(n) < 0.8, right, labels).astype("uint8")
    labels[-1], labels[0] = (right[-1] + 1) % NUM_CLASSES, right[0]
    return images, labels, weights


def accuracy_of(images, labels, weights, k, batch_size):
    ctx = [device(i) for i in range(k)]
    params = [[nd.array(weights, ctx=c)] for c in ctx]
    return accuracy(images, labels, params, ctx, toy, batch_size)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "n, batch_size", [(1, 1), (1, 64), (7, 1), (7, 3), (7, 64), (257, 64), (257, 256), (257, 1000)]
)
def test_accuracy_is_the_share_that_numpy_counts(n, k, batch_size):
    images, labels, weights = toy_data(n)
    correct = ((images @ weights).argmax(axis=1) == labels).sum()
    assert accuracy_of(images, labels, weights, k, batch_size) == correct / n


def test_every_device_evaluates_with_its_own_parameters():
    images, _, weights = toy_data(8)
    labels = (images @ weights).argmax(axis=1).astype("uint8")
    ctx = [device(0), device(1)]
    inverted = [[nd.array(weights, ctx=ctx[0])], [nd.array(-weights, ctx=ctx[1])]]
    assert accuracy(images, labels, inverted, ctx, toy) == 0.5


def test_accuracy_within_the_callers_recording_is_the_same():
    images, _, weights = toy_data(8)
    labels, params = (images @ weights).argmax(axis=1), nd.array(weights, ctx=device())
    params.attach_grad()
    with autograd.record():
        assert accuracy(images, labels, [[params]], [device()], toy, batch_size=3) == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_scores_may_have_any_float_dtype_and_labels_a_second_axis(world, dtype):
    """The label of every other sample is the best of 3,000 classes, which float16 cannot count."""
    images = np.zeros((20, 3000), dtype)
    images[:, 2999], images[:, 2998] = 1, 0.5
    labels = np.where(np.arange(20) % 2, 2999, 2998).astype("int32")
    ctx = contexts(2)
    params = [world.ones((1,), dtype=dtype, ctx=c) for c in ctx]
    for given in (labels, labels.reshape((20, 1))):
        assert accuracy(images, given, params, ctx, lambda X, one: X * one) == 0.5


@pytest.mark.parametrize(
    ("num_images", "shape", "words"),
    [
        (7, (8,), r"\(8,\) for 7 images"),
        (7, (6,), r"\(6,\) for 7 images"),
        (7, (7, 2), r"\(7, 2\) for 7 images"),
        (0, (0,), "at least 1 image, got 0"),
    ],
)
def test_what_has_no_accuracy_is_refused(num_images, shape, words):
    images, params = np.zeros((num_images, 4), "uint8"), [[nd.ones((4, 5), device())]]
    with pytest.raises(ValueError, match=words):
        accuracy(images, np.zeros(shape), params, [device()], toy)
