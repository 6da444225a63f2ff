"""The Trainer for Gluon networks on several devices, and which of their gradients count."""

from gluonpar.gluon import kvstore
from gluonpar.gluon.trainer import Trainer
from gluonpar.gluon.update import check_draws_nothing  # noqa: F401 - for the other rooms

__all__ = ["Trainer", "kvstore"]
