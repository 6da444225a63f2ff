"""gluonpar: one model on several devices in MXNet/Gluon, by hand, where every step can be read.

``import gluonpar`` imports neither MXNet nor NumPy; the first name that needs them does.
"""

# ruff: noqa: I001 - the names of __all__ come first
from __future__ import annotations

import ast
import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gluonpar.install import __version__, startup

# Type checkers read these imports. At run time _modules() reads them, and each is made on use.
if TYPE_CHECKING:
    from gluonpar import cluster, metrics
    from gluonpar.adapters import Towers, average_gradients, make_parallel
    from gluonpar.batch_norm import SyncBatchNorm
    from gluonpar.collectives import allreduce, broadcast
    from gluonpar.diagnostics.verification import verify
    from gluonpar.gluon import Trainer
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


@functools.lru_cache(None)
def _modules() -> dict[str, str]:
    """Return the module of each name that this file imports for type checkers."""
    nodes = ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    imports: Any = next(node for node in nodes if isinstance(node, ast.If)).body
    return {each.name: node.module for node in imports for each in node.names}


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        modules = _modules()
        is_part = any(f"{module}.".startswith(f"gluonpar.{name}.") for module in modules.values())
        if name not in modules and not is_part:
            raise AttributeError(f"module 'gluonpar' has no attribute {name!r}")
        startup.start()
        if is_part or modules[name] == "gluonpar":
            return importlib.import_module(f"gluonpar.{name}")
        globals()[name] = getattr(importlib.import_module(modules[name]), name)
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*__all__, *_modules()})


startup.install()
