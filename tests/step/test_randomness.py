"""Dropout differs from device to device and step to step, and repeats with the seed."""

import mxnet as mx
import numpy as np
import pytest
from contexts import device
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


@pytest.mark.parametrize("hybridized", [False, True])
def test_devices_and_steps_drop_different_elements(hybridized):
    net = nn.HybridSequential()
    net.add(nn.Dropout(0.5))
    net.initialize(ctx=CTX)
    net.hybridize(hybridized)
    mx.random.seed(7)
    masks = []
    for _ in range(2):
        with autograd.record():
            outs = [net(mx.nd.ones((SIZE,), ctx=c)) for c in CTX]
        masks += [out.asnumpy() > 0 for out in outs]
    for i, mask in enumerate(masks):
        assert mask.mean() == pytest.approx(0.5, abs=0.05)
        for other in masks[:i]:  # independent masks agree in half of the elements, +- 1/128
            assert (mask == other).mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("k", [1, 3])
def test_training_with_dropout_repeats_bit_for_bit_with_the_seed(k):
    results = []
    for seed in (5, 5, 6):
        mx.random.seed(5)
        net = nn.HybridSequential(prefix="net_")
        net.add(nn.Dense(16, in_units=8), SeededDropout(0.5), nn.Dense(1, in_units=16))
        net.initialize(mx.init.Xavier(), ctx=CTX[:k])
        net.hybridize(static_alloc=True, static_shape=True)
        trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        mx.random.seed(seed)
        for _ in range(3):
            with autograd.record():
                losses = [net(mx.nd.ones((4, 8), ctx=c)) ** 2 for c in CTX[:k]]
            autograd.backward(losses)
            trainer.step(4 * k)
        params = net.collect_params().values()
        results.append(np.concatenate([p.data(CTX[k - 1]).asnumpy().ravel() for p in params]))
    assert results[0].tobytes() == results[1].tobytes() != results[2].tobytes()
