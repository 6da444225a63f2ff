"""A whole training run: data, epochs, console output, checkpoints, profile, and command line.

The names are imported when they are used, since the doctor reads data/ without MXNet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gluonpar.options import Configuration
    from gluonpar.training.checkpointing import ResumeError, Terminated
    from gluonpar.training.history import Console, Epoch, History
    from gluonpar.training.run import Run, train

__all__ = ["Configuration", "Console", "Epoch", "History", "ResumeError", "Run", "Terminated"]
__all__ += ["train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gluonpar.training import checkpointing, run

    return getattr(checkpointing if name == "ResumeError" else run, name)
