"""A whole training run: data, epochs, console output, checkpoints, profile, and command line."""

from gluonpar.training.checkpointing import ResumeError
from gluonpar.training.configuration import Configuration
from gluonpar.training.console import Console
from gluonpar.training.history import Epoch, History
from gluonpar.training.run import Run, train
from gluonpar.training.termination import Terminated

CannotResume = ResumeError  # its former name

__all__ = ["Configuration", "Console", "Epoch", "History", "ResumeError", "Run", "Terminated"]
__all__ += ["train"]
