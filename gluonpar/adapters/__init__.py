"""Adapters for loops in other styles: Module, Towers, make_parallel, Estimator, DataLoader."""

from gluonpar.adapters import module  # noqa: F401 - it prepares MXNet's Module for our kvstore
from gluonpar.adapters.data_loader import DataLoader
from gluonpar.adapters.estimator import BatchProcessor
from gluonpar.adapters.parallel import make_parallel
from gluonpar.adapters.towers import Towers, average_gradients

__all__ = ["BatchProcessor", "DataLoader", "Towers", "average_gradients", "make_parallel"]
