"""gluonpar.Trainer trains any kind of network, whatever is frozen and however small the batch."""

import gluon_runs as runs
import mxnet as mx
import numpy as np
import pytest
from gluon_nets import NETS, frozen
from gluon_runs import assert_as_one, weights
from mxnet.gluon import nn

from gluonpar.gluon.trainer import Trainer


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", NETS)
def test_any_kind_of_network_is_trained(name, optimizer, k, small_buckets):
    """Batch sizes change, and some are below the number of devices."""
    data = runs.batches((7, 2, 8, 1, 5, 8, 9, 2, 7))
    options = {"learning_rate": 0.05, "wd": 0.01}
    net, _ = runs.run(k, optimizer, options, NETS[name], data)
    assert_as_one(net, runs.stock(optimizer, options, NETS[name], data))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_frozen_parameters_stay(optimizer, small_buckets):
    net, _ = runs.run(3, optimizer, make=frozen)
    assert_as_one(net, runs.stock(optimizer, make=frozen))
    for i in (2, 3):
        np.testing.assert_array_equal(runs.values(net, 2)[i], runs.start_values()[i])


def test_with_all_parameters_frozen_there_is_nothing_to_do():
    [param] = weights([[1.0, 2.0]], 2, grad_req="null")
    trainer = Trainer([param], "sgd")
    trainer.step(1)
    assert param.list_data()[1].asnumpy().tolist() == [1, 2]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
def test_arrays_of_mx_np_are_trained_as_those_of_mx_nd(optimizer):
    options = {"learning_rate": 0.05, "wd": 0.01}
    with mx.util.np_shape(True), mx.util.np_array(True):
        net, trainer = runs.run(3, optimizer, options)
        trainer.check_replicas()
    weight = net[0].weight
    assert {type(array) for array in weight.list_data() + weight.list_grad()} == {mx.np.ndarray}
    assert_as_one(net, runs.stock(optimizer, options))


def test_statistics_of_batch_normalisation_may_differ():
    def make(ctx):
        net = nn.HybridSequential(prefix="bn_")
        with net.name_scope():
            net.add(nn.Dense(8, in_units=6), nn.BatchNorm(in_channels=8), nn.Dense(3, in_units=8))
        net.initialize(ctx=ctx)
        return net

    net, trainer = runs.run(2, make=make)
    means = [mean.asnumpy() for mean in net[1].running_mean.list_data()]
    assert (means[0] != means[1]).any()
    trainer.check_replicas()
