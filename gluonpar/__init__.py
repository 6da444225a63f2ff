"""gluonpar: one model on several devices in MXNet/Gluon, by hand, where every step can be read."""

# ruff: noqa: E402, I001 - the command and the runtime come first, before MXNet is imported
from gluonpar.install import entry

if entry.without_mxnet():  # `gluonpar doctor`, where the rest may be broken, and `gluonpar --help`
    from gluonpar import __main__ as _command

    raise SystemExit(_command.main())

from gluonpar.install import startup

try:
    startup.start()
except ImportError as error:
    entry.end_command(error)
    raise

from gluonpar import cluster, metrics
from gluonpar.adapters import Towers, average_gradients, make_parallel
from gluonpar.batch_norm import SyncBatchNorm
from gluonpar.collectives import allreduce, broadcast
from gluonpar.diagnostics.verification import verify
from gluonpar.gluon import Trainer
from gluonpar.install import __version__
from gluonpar.models.lenet import init_lenet, lenet
from gluonpar.optim import sgd
from gluonpar.replicas import get_params
from gluonpar.sharding import split_and_load
from gluonpar.step import allreduce_grads, train_batch
from gluonpar.tasks import run_tasks
from gluonpar.training import train

# More names, for programs that use them from here; `as` says so to type checkers.
from gluonpar.adapters import BatchProcessor as BatchProcessor, DataLoader as DataLoader
from gluonpar.batch_norm import average_statistics as average_statistics
from gluonpar.batch_norm import broadcast_statistics as broadcast_statistics
from gluonpar.batch_norm import set_num_devices as set_num_devices
from gluonpar.checkpoint import export_onnx as export_onnx
from gluonpar.checkpoint import load_checkpoint as load_checkpoint
from gluonpar.checkpoint import save_checkpoint as save_checkpoint
from gluonpar.collectives import all_gather as all_gather, reduce_scatter as reduce_scatter
from gluonpar.collectives import allreduce_many as allreduce_many
from gluonpar.collectives import explain as explain, reduce as reduce
from gluonpar.diagnostics.verification import Wrong as Wrong
from gluonpar.gluon import kvstore as kvstore
from gluonpar.runtime.cached_op import operators as operators, traceable as traceable
from gluonpar.sharding import split_samples as split_samples
from gluonpar.tasks import TaskError as TaskError

__all__ = ["SyncBatchNorm", "Towers", "Trainer", "__version__", "allreduce", "allreduce_grads"]
__all__ += ["average_gradients", "broadcast", "cluster", "get_params", "init_lenet", "lenet"]
__all__ += ["make_parallel", "metrics", "run_tasks", "sgd", "split_and_load", "train"]
__all__ += ["train_batch", "verify"]
