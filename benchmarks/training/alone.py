"""Modules of gluonpar that need MXNet at most, loaded without gluonpar.

``import gluonpar`` prepares the process, and MXNet would no longer be as it comes.
"""

from __future__ import annotations

import importlib.util
import pathlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """``gluonpar/name.py``, as a module of its own."""
    path = pathlib.Path(__file__).resolve().parents[2] / "gluonpar" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"gluonpar_{name.replace('/', '_')}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
