"""gluonpar: one model on several devices in MXNet/Gluon, by hand, where every step can be read."""

# ruff: noqa: E402, I001 - the runtime comes first: it prepares the process before MXNet is imported
from gluonpar.diagnostics.doctor import entry

entry.for_doctor()  # `python -m gluonpar doctor` is answered here: what follows may be what is ill

from gluonpar.runtime import startup

startup.start()

from gluonpar.gluon import kvstore  # kvstore='gluonpar' is known to MXNet from here on
from gluonpar.gluon.average import average_gradients
from gluonpar.gluon.running_statistics import average_statistics, broadcast_statistics
from gluonpar.collectives import (
    all_gather,
    allreduce,
    allreduce_many,
    broadcast,
    explain,
    reduce,
    reduce_scatter,
)
from gluonpar.models.lenet import init_lenet, lenet
from gluonpar.checkpoint.onnx_export import export_onnx
from gluonpar.optim import sgd
from gluonpar.gluon.parallel import make_parallel
from gluonpar.ragged import split_samples
from gluonpar.replicas import get_params
from gluonpar.sharding import split_and_load
from gluonpar.step import train_batch
from gluonpar.gluon.sync_batch_norm import SyncBatchNorm, set_num_devices
from gluonpar.gluon.tasks import TaskError, run_tasks
from gluonpar.gluon.towers import Towers
from gluonpar.training.run import train
from gluonpar.checkpoint.training_state import load_checkpoint, save_checkpoint
from gluonpar.gluon.trainer import Trainer
from gluonpar.diagnostics.verification import Wrong, verify
from gluonpar.runtime.version import __version__

__all__ = [
    "SyncBatchNorm",
    "TaskError",
    "Towers",
    "Trainer",
    "Wrong",
    "__version__",
    "all_gather",
    "allreduce",
    "allreduce_many",
    "average_gradients",
    "average_statistics",
    "broadcast",
    "broadcast_statistics",
    "explain",
    "export_onnx",
    "get_params",
    "init_lenet",
    "kvstore",
    "lenet",
    "load_checkpoint",
    "make_parallel",
    "reduce",
    "reduce_scatter",
    "run_tasks",
    "save_checkpoint",
    "set_num_devices",
    "sgd",
    "split_and_load",
    "split_samples",
    "train",
    "train_batch",
    "verify",
]
