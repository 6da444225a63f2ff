"""Graphs with ``static_shape`` keep arrays of gradients, and train as graphs that keep none."""

import contextlib

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

import gluonpar
from tests.support.any_program import OneHead
from tests.support.contexts import contexts
from tests.support.gluon_runs import STATIC

# By batch, which heads are called on each device, one after the other, and the number of samples.
SHARED = [("ab", 6), ("a", 6), ("ab", 6), ("b", 5), ("a", 6), ("ab", 6), ("b", 6)]
APART_FIRST = [("a", 6), ("b", 6), ("ab", 6), ("a", 4), ("b", 6), ("ab", 6)]
CALLED_TWICE = [("aa", 6), ("a", 6), ("aa", 6), ("a", 5), ("aa", 6)]


def trained(heads_by_batch, k, hybridize, micro_batches):
    """Return the parameters after training body and heads by the batches."""
    ctx, rng = contexts(k), np.random.RandomState(0)
    net = nn.HybridSequential(prefix="")
    with net.name_scope():
        net.add(nn.Dense(5, "tanh", in_units=3), nn.Dense(2, in_units=5), nn.Dense(2, in_units=5))
    net.initialize(ctx=ctx)
    params = net.collect_params()
    for param in params.values():
        param.set_data(mx.nd.array(rng.normal(0, 0.5, param.shape)))
    heads = {"a": OneHead(net[0], net[1]), "b": OneHead(net[0], net[2])}
    for head in heads.values():
        head.hybridize(**hybridize)
    trainer = gluonpar.Trainer(params, "sgd", {"learning_rate": 0.05})
    for names, num_samples in heads_by_batch:
        for n in range(micro_batches):
            last = n == micro_batches - 1
            X = mx.nd.array(rng.normal(size=(num_samples, 3)))
            with contextlib.nullcontext() if last else trainer.no_sync():
                with autograd.record():
                    losses = [
                        sum(((heads[name](part) - 1) ** 2).sum(axis=1) for name in names)
                        for part in gluonpar.split_and_load(X, ctx)
                    ]
                autograd.backward(losses)
        trainer.step(num_samples * micro_batches, ignore_stale_grad=True)
    return [param.data(ctx[0]).asnumpy() for param in params.values()]


@pytest.mark.parametrize(
    "batches, k, micro_batches",
    [
        *((batches, k, 1) for batches in (SHARED, APART_FIRST) for k in (1, 2, 3)),
        *((CALLED_TWICE, k, 1) for k in (1, 2)),
        *((batches, 2, 2) for batches in (SHARED, APART_FIRST, CALLED_TWICE)),
    ],
)
def test_blocks_that_share_a_layer_or_are_called_twice_in_some_batches(batches, k, micro_batches):
    want, got = (trained(batches, k, mode, micro_batches) for mode in ({}, STATIC))
    for mine, expected in zip(got, want):
        assert np.linalg.norm(mine - expected) < 1e-5 * np.linalg.norm(expected)
