"""For loops in others' styles: kvstore='gluonpar', Towers, make_parallel, Estimator, DataLoader."""

import sys

from gluonpar import gluon
from gluonpar.adapters import kvstore, towers
from gluonpar.adapters.data_loader import DataLoader
from gluonpar.adapters.estimator import BatchProcessor
from gluonpar.adapters.parallel import make_parallel
from gluonpar.adapters.towers import Towers, TowersEpoch, average_gradients

__all__ = [
    "BatchProcessor",
    "DataLoader",
    "Towers",
    "TowersEpoch",
    "average_gradients",
    "kvstore",
    "make_parallel",
]

# Programs may import them by their former names.
for _module in (kvstore, towers):
    _former = _module.__name__.rpartition(".")[2]
    sys.modules[f"{gluon.__name__}.{_former}"] = _module
    setattr(gluon, _former, _module)
