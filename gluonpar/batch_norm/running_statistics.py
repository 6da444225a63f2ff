"""Running statistics of batch normalisation, made equal on all devices.

In training, ``BatchNorm`` on each device normalises by the mean and variance of its own shard and
keeps running averages of them, so a device evaluates with its own. ``net.save_parameters`` writes
their mean over devices (``Parameter._reduce`` in MXNet 1.9.1), which no device has evaluated with.
So call one of the two functions below before evaluating or saving. The running statistics of
:class:`gluonpar.SyncBatchNorm` are equal on all devices already.
"""

from __future__ import annotations

import mxnet as mx
from mxnet import gluon

from gluonpar.collectives import allreduce_many, broadcast
from gluonpar.runtime import devices

NAMES = ".*(running|moving)_(mean|var)$"  # Gluon's, and Module's and SymbolBlock's


def average_statistics(net: gluon.Block) -> None:
    """Replace every running mean and variance in ``net`` by its mean over devices, on all devices.

    With several processes the mean is over the devices of all of them, and all must call this. In
    place and without waiting. Devices weigh the same. The variance becomes the mean of the devices'
    variances, which lacks the variance of the shards' means, about 1 / shard size of it. Parameters
    must be initialised.
    """
    allreduce_many(_of_devices(net), op="mean")


def broadcast_statistics(net: gluon.Block, root: int = 0) -> None:
    """Replace every running mean and variance in ``net`` by device ``root``'s, on all devices.

    In place and without waiting; ``root`` counts the devices as :func:`gluonpar.broadcast` does.
    PyTorch's DistributedDataParallel does the same with buffers. Raises ValueError unless ``root``
    is the number of a device.
    """
    for data in _of_devices(net):
        broadcast(data, root)


def _of_devices(net: gluon.Block) -> list[list[mx.nd.NDArray]]:
    """Per running mean or variance, its copies; ValueError if two are on one context."""
    params = net.collect_params(NAMES).values()
    for param in params:
        devices.check_distinct(param.list_ctx())
    return [param.list_data() for param in params]
