"""For Gluon programs: the Trainer, kvstore='gluonpar', SyncBatchNorm, make_parallel, towers."""

from gluonpar.gluon import kvstore, static_graphs  # noqa: F401
from gluonpar.gluon.average import average_gradients
from gluonpar.gluon.data_loader import DataLoader
from gluonpar.gluon.estimator import BatchProcessor
from gluonpar.gluon.parallel import make_parallel
from gluonpar.gluon.running_statistics import average_statistics, broadcast_statistics
from gluonpar.gluon.sync_batch_norm import SyncBatchNorm, set_num_devices
from gluonpar.gluon.tasks import TaskError, run_tasks
from gluonpar.gluon.towers import Towers, TowersEpoch
from gluonpar.gluon.trainer import Trainer

__all__ = [
    "BatchProcessor",
    "DataLoader",
    "SyncBatchNorm",
    "TaskError",
    "Towers",
    "TowersEpoch",
    "Trainer",
    "average_gradients",
    "average_statistics",
    "broadcast_statistics",
    "kvstore",
    "make_parallel",
    "run_tasks",
    "set_num_devices",
]
