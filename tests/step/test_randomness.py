"""Dropout differs from device to device and step to step, and repeats with the seed."""

import mxnet as mx
import numpy as np
import pytest
from contexts import device, unused
from mxnet import autograd
from mxnet.gluon import nn

from gluonpar.gluon.trainer import Trainer

K = 4
CTX = [device(i) for i in range(K)]
SIZE = 4096


class SeededDropout(nn.Dropout):
    """On GPUs, MXNet does not seed cuDNN's dropout, which nn.Dropout takes, by mx.random.seed."""

    def hybrid_forward(self, F, x):
        return F.Dropout(x, p=self._rate, cudnn_off=True)


def gluon_dropout(layer, **hybridized):
    net = nn.HybridSequential()
    net.add(layer(0.5))
    net.initialize(ctx=CTX)
    if hybridized.pop("hybridized", True):
        net.hybridize(**hybridized)
    return net


def dropouts(layer, **options):
    return {
        "mx.nd": lambda: lambda x: mx.nd.Dropout(x, p=0.5, **options),
        "imperative": lambda: gluon_dropout(layer, hybridized=False),
        "hybridized": lambda: gluon_dropout(layer),
        "static": lambda: gluon_dropout(layer, static_alloc=True, static_shape=True),
    }


DROPOUTS, SEEDED = dropouts(nn.Dropout), dropouts(SeededDropout, cudnn_off=True)


@pytest.fixture(params=DROPOUTS)
def dropout(request):
    return DROPOUTS[request.param]()


@pytest.fixture(params=SEEDED)
def seeded_dropout(request):
    return SEEDED[request.param]()


def masks(dropout, ctx=CTX):
    """Which elements each device keeps."""
    with autograd.record():
        outs = [dropout(mx.nd.ones((SIZE,), ctx=c)) for c in ctx]
    return np.array([out.asnumpy() > 0 for out in outs])


def agreement(one, other):
    """Share of equal elements: 1/2 for independent masks, give or take 1/128."""
    return (one == other).mean()


def test_devices_drop_different_elements(dropout):
    mx.random.seed(7)
    drawn = masks(dropout)
    for i in range(K):
        assert drawn[i].mean() == pytest.approx(0.5, abs=0.05)
        for j in range(i):
            assert agreement(drawn[i], drawn[j]) == pytest.approx(0.5, abs=0.05)


def test_the_seed_repeats_every_step_on_every_device(seeded_dropout):
    if device().device_type == "gpu":
        masks(seeded_dropout)  # a static graph's first call takes one of the generators in vain
    runs = []
    for _ in range(2):
        mx.random.seed(7)
        runs.append([masks(seeded_dropout) for _ in range(3)])
    np.testing.assert_array_equal(runs[0], runs[1])


def test_steps_drop_different_elements(dropout):
    mx.random.seed(7)
    first, second = masks(dropout), masks(dropout)
    for one, other in zip(first, second):
        assert agreement(one, other) == pytest.approx(0.5, abs=0.05)


def test_another_seed_drops_different_elements(seeded_dropout):
    mx.random.seed(7)
    first = masks(seeded_dropout)
    mx.random.seed(8)
    for one, other in zip(first, masks(seeded_dropout)):
        assert agreement(one, other) == pytest.approx(0.5, abs=0.05)


def test_a_device_that_has_not_been_used_before_repeats_too():
    runs = []
    for _ in range(2):
        mx.random.seed(7)
        runs.append(masks(SEEDED["mx.nd"](), unused()))
    np.testing.assert_array_equal(runs[0], runs[1])


def test_backward_drops_what_forward_dropped(dropout):
    shards = [mx.nd.ones((SIZE,), ctx=c) for c in CTX]
    for shard in shards:
        shard.attach_grad()
    with autograd.record():
        outs = [dropout(shard) for shard in shards]
    autograd.backward(outs)
    for out, shard in zip(outs, shards):
        np.testing.assert_array_equal(out.asnumpy(), shard.grad.asnumpy())


def test_prediction_drops_nothing(dropout):
    for c in CTX:
        assert (dropout(mx.nd.ones((SIZE,), ctx=c)).asnumpy() == 1).all()


@pytest.mark.parametrize("k", [1, 3])
def test_training_with_dropout_repeats_bit_for_bit_with_the_seed(k):
    results = []
    for _ in range(2):
        mx.random.seed(5)
        net = nn.HybridSequential(prefix="net_")
        net.add(nn.Dense(16, in_units=8), SeededDropout(0.5), nn.Dense(1, in_units=16))
        net.initialize(mx.init.Xavier(), ctx=CTX[:k])
        net.hybridize(static_alloc=True, static_shape=True)
        trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        for _ in range(3):
            with autograd.record():
                losses = [net(mx.nd.ones((4, 8), ctx=c)) ** 2 for c in CTX[:k]]
            autograd.backward(losses)
            trainer.step(4 * k)
        results.append([p.data(CTX[k - 1]).asnumpy() for p in net.collect_params().values()])
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)
