"""For loops in others' styles: kvstore='gluonpar', Towers, make_parallel, Estimator, DataLoader."""

from gluonpar.adapters import kvstore
from gluonpar.adapters.data_loader import DataLoader
from gluonpar.adapters.estimator import BatchProcessor
from gluonpar.adapters.parallel import make_parallel
from gluonpar.adapters.towers import Towers, TowersEpoch, average_gradients

__all__ = ["BatchProcessor", "DataLoader", "Towers", "TowersEpoch", "average_gradients"]
__all__ += ["kvstore", "make_parallel"]
