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
    code = entry.exit_code(error)  # of the command; None in other programs
    if code is None:
        raise
    raise SystemExit(code) from None

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

from gluonpar.adapters import (  # and kvstore='gluonpar' is registered with MXNet
    BatchProcessor,
    DataLoader,
    Towers,
    average_gradients,
    kvstore,
    make_parallel,
)
from gluonpar.batch_norm import (
    SyncBatchNorm,
    TaskError,
    average_statistics,
    broadcast_statistics,
    run_tasks,
    set_num_devices,
)
from gluonpar.checkpoint import export_onnx, load_checkpoint, save_checkpoint
from gluonpar.collectives import (
    all_gather,
    allreduce,
    allreduce_many,
    broadcast,
    explain,
    reduce,
    reduce_scatter,
)
from gluonpar.gluon import Trainer
from gluonpar.models.lenet import init_lenet, lenet
from gluonpar.optim import sgd
from gluonpar.replicas import get_params
from gluonpar.runtime.cached_op import operators, traceable
from gluonpar.install import __version__
from gluonpar.sharding import split_and_load, split_samples
from gluonpar.step import allreduce_grads, train_batch

if _TYPE_CHECKING:
    from gluonpar.diagnostics.verification import Wrong, verify
    from gluonpar.training.run import train

# Imported when first asked for: a program with a loop of its own needs none of them.
_MODULES = {
    "Wrong": "gluonpar.diagnostics.verification",
    "train": "gluonpar.training.run",
    "verify": "gluonpar.diagnostics.verification",
}

__all__ = [
    "BatchProcessor",
    "DataLoader",
    "SyncBatchNorm",
    "TaskError",
    "Towers",
    "Trainer",
    "Wrong",
    "__version__",
    "all_gather",
    "allreduce",
    "allreduce_grads",
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
    "operators",
    "reduce",
    "reduce_scatter",
    "run_tasks",
    "save_checkpoint",
    "set_num_devices",
    "sgd",
    "split_and_load",
    "split_samples",
    "traceable",
    "train",
    "train_batch",
    "verify",
]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'gluonpar' has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list:
    return sorted({*globals(), *__all__})
