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

import importlib as _importlib
import typing as _typing

from gluonpar import cluster, metrics
from gluonpar.adapters import (  # and kvstore='gluonpar' is registered with MXNet
    Towers,
    average_gradients,
    make_parallel,
)
from gluonpar.batch_norm import SyncBatchNorm, run_tasks
from gluonpar.collectives import allreduce, broadcast
from gluonpar.gluon import Trainer
from gluonpar.install import __version__
from gluonpar.models.lenet import init_lenet, lenet
from gluonpar.optim import sgd
from gluonpar.replicas import get_params
from gluonpar.sharding import split_and_load
from gluonpar.step import allreduce_grads, train_batch

# More names, for programs that use them from here; `as` says so to type checkers.
from gluonpar.adapters import (
    BatchProcessor as BatchProcessor,
    DataLoader as DataLoader,
    kvstore as kvstore,
)
from gluonpar.batch_norm import (
    TaskError as TaskError,
    average_statistics as average_statistics,
    broadcast_statistics as broadcast_statistics,
    set_num_devices as set_num_devices,
)
from gluonpar.checkpoint import (
    export_onnx as export_onnx,
    load_checkpoint as load_checkpoint,
    save_checkpoint as save_checkpoint,
)
from gluonpar.collectives import (
    all_gather as all_gather,
    allreduce_many as allreduce_many,
    explain as explain,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
)
from gluonpar.runtime.cached_op import operators as operators, traceable as traceable
from gluonpar.sharding import split_samples as split_samples

__all__ = ["SyncBatchNorm", "Towers", "Trainer", "__version__", "allreduce", "allreduce_grads"]
__all__ += ["average_gradients", "broadcast", "cluster", "get_params", "init_lenet", "lenet"]
__all__ += ["make_parallel", "metrics", "run_tasks", "sgd", "split_and_load", "train"]
__all__ += ["train_batch", "verify"]

if _typing.TYPE_CHECKING:
    from gluonpar.diagnostics.verification import Wrong as Wrong, verify as verify
    from gluonpar.training.run import train as train
else:  # imported when first asked for: a program with a loop of its own needs none of them
    _MODULES = {
        "Wrong": "gluonpar.diagnostics.verification",
        "train": "gluonpar.training.run",
        "verify": "gluonpar.diagnostics.verification",
    }

    def __getattr__(name: str):
        if name not in _MODULES:
            raise AttributeError(f"module 'gluonpar' has no attribute {name!r}")
        value = globals()[name] = getattr(_importlib.import_module(_MODULES[name]), name)
        return value

    def __dir__() -> list:
        return sorted({*globals(), *_MODULES})
