"""Batch normalisation over all devices, the tasks that it is trained in, running statistics."""

from gluonpar.batch_norm.running_statistics import average_statistics, broadcast_statistics
from gluonpar.batch_norm.sync_batch_norm import SyncBatchNorm, set_num_devices
from gluonpar.batch_norm.tasks import TaskError, all_devices, run_tasks

__all__ = ["SyncBatchNorm", "TaskError", "all_devices", "average_statistics"]
__all__ += ["broadcast_statistics", "run_tasks", "set_num_devices"]
