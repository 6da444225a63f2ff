"""Files of a training run: checkpoints, optimizer states, parameters, ONNX.

The checkpoint format is in :mod:`~gluonpar.checkpoint.training_state`, which names the parts it uses.
"""

from gluonpar.checkpoint.training_state import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
