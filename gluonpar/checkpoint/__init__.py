"""Files of a training run: checkpoints, optimizer states, parameters, ONNX.

:mod:`~gluonpar.checkpoint.training_state` has the format of a checkpoint, and names its parts.
"""

from gluonpar.checkpoint.onnx_export import export_onnx
from gluonpar.checkpoint.training_state import load_checkpoint, save_checkpoint

__all__ = ["export_onnx", "load_checkpoint", "save_checkpoint"]
