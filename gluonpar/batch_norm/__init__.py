"""Batch normalisation over all devices, and running statistics."""

from gluonpar.batch_norm.running_statistics import average_statistics, broadcast_statistics
from gluonpar.batch_norm.sync_batch_norm import SyncBatchNorm, set_num_devices

__all__ = ["SyncBatchNorm", "average_statistics", "broadcast_statistics", "set_num_devices"]
