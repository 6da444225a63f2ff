"""For loops in others' styles: Module, Towers, make_parallel, Estimator, DataLoader."""

import sys

from gluonpar import batch_norm, gluon, tasks
from gluonpar.adapters import module, towers
from gluonpar.adapters.data_loader import DataLoader
from gluonpar.adapters.estimator import BatchProcessor
from gluonpar.adapters.parallel import make_parallel
from gluonpar.adapters.towers import Towers, average_gradients

__all__ = ["BatchProcessor", "DataLoader", "Towers", "average_gradients", "make_parallel"]
__all__ += ["module"]

# Programs may import these from gluonpar.gluon, where they were before this room was made.
for _room in (batch_norm, tasks, sys.modules[__name__]):
    vars(gluon).update((_name, getattr(_room, _name)) for _name in _room.__all__)
sys.modules["gluonpar.gluon.towers"] = towers
