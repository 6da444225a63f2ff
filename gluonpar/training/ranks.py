"""A run on each rank of several processes: its options, and checks."""

from __future__ import annotations

import copy
import zlib
from typing import Sequence

import mxnet as mx
import numpy as np

from gluonpar import cluster
from gluonpar.install import __version__
from gluonpar.training.configuration import Configuration
from gluonpar.training.data.dataset import Dataset

# Output, which only rank 0 writes, and the values of these fields on the other ranks.
_RANK_ZERO_ONLY = {
    **dict.fromkeys(("save_dir", "plot", "history", "tensorboard")),
    "profile": False,
}

# Fields that may differ between ranks: machines have different devices and folders.
_MAY_DIFFER = {*_RANK_ZERO_ONLY, "gpus", "num_gpus", "device", "data_dir"}


def without_output(configuration: Configuration) -> Configuration:
    """Return the configuration; on other ranks than 0, without the fields that only rank 0 uses."""
    mine = copy.copy(configuration)
    if not cluster.is_main():
        vars(mine).update(_RANK_ZERO_ONLY)  # without __post_init__: it has been checked as a whole
    return mine


def check_same_run(configuration: Configuration, ctx: Sequence[mx.Context], data: Dataset) -> None:
    """Raise ValueError unless all ranks have the same options, data, versions and devices."""
    if cluster.size() == 1:
        return
    options = {k: v for k, v in vars(configuration).items() if k not in _MAY_DIFFER}
    versions = {"gluonpar": __version__, "mxnet": mx.__version__, "numpy": np.__version__}
    facts = {"number of devices": len(ctx), "checksum of the data": checksums(data)}
    cluster.check_equal({**options, **versions, **facts})


def checksums(data: Dataset) -> list[int]:
    """Return the CRC-32 of images and labels, which detects other data, but not tampering."""
    arrays = (data.train_images, data.train_labels, data.test_images, data.test_labels)
    return [zlib.crc32(np.ascontiguousarray(array)) for array in arrays]
