"""Running statistics of batch normalisation, made equal on all devices.

In training, ``BatchNorm`` on each device normalises by the mean and variance of its own shard and
keeps running averages of them, so a device evaluates with its own. ``net.save_parameters`` writes
their mean over devices (``Parameter._reduce`` in MXNet 1.9.1), which no device has evaluated with.
So call one of the two functions below before evaluating or saving. The running statistics of
:class:`gluonpar.SyncBatchNorm` are equal on all devices already.
"""

from __future__ import annotations

from mxnet import autograd, gluon

from gluonpar import cluster
from gluonpar.collectives import broadcast_many, hierarchical, mean

NAMES = ".*(running|moving)_(mean|var)$"  # Gluon's, and Module's and SymbolBlock's


def average_statistics(net: gluon.Block) -> None:
    """Replace every running mean and variance in ``net`` by its mean over devices, on all devices.

    With several processes the mean is over the devices of all of them; all must call this, with the
    same number of devices. In place and without waiting. Devices weigh the same. The variance
    becomes the mean of the devices' variances, which lacks the variance of the shards' means, about
    1 / shard size of it. Parameters must be initialised.
    """
    lists = [param.list_data() for param in net.collect_params(NAMES).values()]
    with autograd.pause():
        size = cluster.size()
        sums = [mean.scaled(copies, size * len(copies)) for copies in lists]
        hierarchical.allreduce_many(sums, one_message=True)
        for totals, copies in zip(sums, lists):
            for total, copy in zip(totals, copies):
                mean.write(total, size * len(copies), [copy])


def broadcast_statistics(net: gluon.Block, root: int = 0) -> None:
    """Replace every running mean and variance in ``net`` by device ``root``'s, on all devices.

    In place and without waiting, as :func:`average_statistics`; PyTorch's DistributedDataParallel
    does the same with buffers. Raises ValueError unless ``root`` is the number of a device.
    """
    broadcast_many([param.list_data() for param in net.collect_params(NAMES).values()], root)
