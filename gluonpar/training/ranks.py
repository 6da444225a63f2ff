"""One rank's side of a run: its part of every batch, what all agree on, what rank 0 does."""

from __future__ import annotations

import copy
import io
import zlib
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np

from gluonpar import cluster
from gluonpar.collectives import partition
from gluonpar.runtime.version import __version__
from gluonpar.training import console as report
from gluonpar.training.data.dataset import Dataset

# What rank 0 does for all: fields of train.Configuration, and what they are on the other ranks.
_RANK_ZERO_ONLY = {"save_dir": None, "plot": None, "profile": False, "trace": None}


def own_part(num_devices: int, weights: Sequence[float] | None) -> Callable[[int], slice] | None:
    """Which samples of a batch of n are this rank's, as a function of n; None: all of them.

    The batch is cut over the devices of all ranks, each of which has ``num_devices``.
    """
    ranks, rank = cluster.size(), cluster.rank()
    if ranks == 1:
        return None
    everybody = None if weights is None else [*weights] * ranks

    def part(n: int) -> slice:
        cuts = partition.slices(n, ranks * num_devices, everybody)
        mine = cuts[rank * num_devices : (rank + 1) * num_devices]
        return slice(mine[0].start, mine[-1].stop)

    return part


def without_output(configuration: Any) -> Any:
    """The same configuration; on other ranks than 0 without what only that one does."""
    mine = copy.copy(configuration)
    if not cluster.is_main():
        vars(mine).update(_RANK_ZERO_ONLY)  # it has been checked as a whole
    return mine


def console(of_rank_zero: report.Console) -> report.Console:
    """Where this rank prints: nowhere, if it is not rank 0."""
    return of_rank_zero if cluster.is_main() else report.Console(io.StringIO(), io.StringIO())


def agree(configuration: Any, ctx: Sequence[mx.Context], data: Dataset) -> None:
    """Raise ValueError, naming rank and difference, unless all ranks are about to do the same."""
    if cluster.size() == 1:
        return
    fields = {k: v for k, v in vars(configuration).items() if k not in _DIFFERENT}
    cluster.agree(
        {
            **fields,
            "number of devices": len(ctx),
            "gluonpar": __version__,
            "mxnet": mx.__version__,
            "numpy": np.__version__,
            "checksum of the data": checksums(data),
        }
    )


def checksums(data: Dataset) -> list[int]:
    """CRC-32 of the images and labels: enough to tell other data, not to tell a forger's."""
    arrays = (data.train_images, data.train_labels, data.test_images, data.test_labels)
    return [zlib.crc32(np.ascontiguousarray(array)) for array in arrays]


def agree_on_parameters(name: str, copies: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    """Raise ValueError unless all ranks' model is ``name``, of the same shapes and dtypes."""
    if cluster.size() > 1:
        kinds = [(of[0].shape, np.dtype(of[0].dtype).name) for of in copies]
        cluster.agree({"model": name, "parameters": kinds})


# Which devices, and where the data lies, may differ from machine to machine.
_DIFFERENT = {*_RANK_ZERO_ONLY, "gpus", "num_gpus", "device", "data_dir"}
