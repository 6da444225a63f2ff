"""Running statistics of batch normalisation, made the same on all devices.

While training, each device's ``BatchNorm`` normalises by the mean and variance of its own shard,
and keeps running averages of them, its own too: so they differ between devices, and a device
evaluates with those it has. ``net.save_parameters`` writes the mean over devices of every
parameter (``Parameter._reduce`` in MXNet 1.9.1), which no device has evaluated with. Therefore call
one of the two functions here before evaluating or saving: what is saved is then what was evaluated.
Layers of :class:`gluonpar.gluon.sync_batch_norm.SyncBatchNorm` have the same ones everywhere anyway.
"""

from __future__ import annotations

from mxnet import gluon

from gluonpar import cluster
from gluonpar.collectives import allreduce, broadcast

_NAMES = ".*(running|moving)_(mean|var)$"  # as Gluon and as Module and SymbolBlock name them


def average_statistics(net: gluon.Block) -> None:
    """Make every running mean and variance in ``net`` its mean over the devices, on all of them.

    With several processes, over all of theirs; then all must call it, with as many devices each.
    In place and without waiting; weights stay as they are. Devices weigh alike. The variance
    becomes the mean of the devices' variances, which lacks what the shards' means differ by, about
    1 / shard size of it. Training goes on from the averages. Parameters must be initialised.
    """
    for copies in _statistics(net):
        allreduce(copies, op="mean")
    if cluster.size() > 1:
        _average_over_processes(_statistics(net))


def broadcast_statistics(net: gluon.Block, root: int = 0) -> None:
    """Make every running mean and variance in ``net`` that of device ``root``, on all of them.

    In place and without waiting, like :func:`average_statistics`; what DistributedDataParallel of
    PyTorch does with buffers. Raises ValueError if there is no device ``root``.
    """
    for copies in _statistics(net):
        if not 0 <= root < len(copies):
            raise ValueError(f"root={root} is none of the {len(copies)} devices, numbered from 0")
        broadcast(copies, root)


def _average_over_processes(lists: list[list]) -> None:
    cluster.allreduce([copies[0] for copies in lists])
    for copies in lists:
        copies[0] /= cluster.size()
        broadcast(copies)


def _statistics(net: gluon.Block) -> list[list]:
    """Of every running statistic, its copies on all devices."""
    return [param.list_data() for param in net.collect_params(_NAMES).values()]
