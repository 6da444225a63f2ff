"""A whole training run: data, epochs, console output, checkpoints, profile, and command line."""

from gluonpar.training.checkpointing import ResumeError, Terminated
from gluonpar.training.configuration import Configuration
from gluonpar.training.console import Console
from gluonpar.training.history import Epoch, History
from gluonpar.training.run import Run, train

__all__ = ["Configuration", "Console", "Epoch", "History", "ResumeError", "Run", "Terminated"]
__all__ += ["train"]
