"""The oracle itself: its gradients against finite differences of its losses."""

import numpy as np
import oracle
import pytest

SHAPES = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]


@pytest.fixture(scope="module")
def problem():
    rng = np.random.RandomState(0)
    X, y = rng.rand(3, 1, 28, 28), np.array([1, 9, 4])
    return X, y, [rng.normal(scale=0.1, size=shape) for shape in SHAPES]


@pytest.mark.parametrize("which", range(8))
def test_gradient_is_the_slope_of_the_summed_losses(problem, which):
    X, y, params = problem
    gradient = oracle.Step(X, y, params).grads[which]
    direction = np.random.RandomState(which).normal(size=gradient.shape)
    step = 1e-8  # a larger one would carry some of 100,000 relus across their kinks

    def loss(t):
        moved = [p + t * direction if i == which else p for i, p in enumerate(params)]
        return oracle.Step(X, y, moved).losses.sum()

    slope = (loss(step) - loss(-step)) / (2 * step)
    assert slope == pytest.approx((gradient * direction).sum(), rel=1e-5)
