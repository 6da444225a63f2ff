"""Import modules of gluonpar without ``gluonpar/__init__.py``, which imports and configures MXNet.

For programs that run without MXNet, or measure it without gluonpar's settings. They run this file::

    runpy.run_path("gluonpar/install/standalone.py")["skip_init"]("gluonpar")
    from gluonpar.install import driver
"""

from __future__ import annotations

import sys
import types
from pathlib import Path


def skip_init(*packages: str) -> None:
    """Make ``packages`` importable without their ``__init__``, unless they have been imported."""
    root = Path(__file__).resolve().parents[2]
    for name in packages:
        if name not in sys.modules:
            package = sys.modules[name] = types.ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")))]
