"""The installed wheels of MXNet, found without importing it, and the libraries of gcc they link to.

Minimal systems lack the first two of these libraries. ``make`` runs this file before anything is
installed::

    python -I gluonpar/install/wheels.py    # prints the Debian packages that are missing
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

# Commands that install MXNet. gluonpar itself requires all that MXNet needs, and without MXNet's
# bound for NumPy, which has no wheels for Python 3.13: there the extra cu112 has only the CUDA
# libraries.
CPU = "pip install --no-deps mxnet==1.9.1"
CUDA = "in a clone of gluonpar pip install -e '.[cu112]'"
if sys.version_info >= (3, 13):
    CUDA += " and pip install --no-deps mxnet-cu112==1.9.1"

# Libraries that MXNet's wheels do not contain, and their Debian packages.
GCC_PACKAGES = {
    "libgomp.so.1": "libgomp1",
    "libquadmath.so.0": "libquadmath0",
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
}


def package() -> Path | None:
    """Return the folder of the package ``mxnet`` that an import would take, or None."""
    spec = importlib.util.find_spec("mxnet")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def installed() -> list[str]:
    """Return the names of the installed wheels of MXNet, such as "mxnet-cu112".

    The list is empty if MXNet was installed otherwise. Several wheels overwrite each other's files.
    """
    folder = package()
    if folder is None:
        return []
    # mxnet_model_server and others, whose names begin with mxnet, do not install the package mxnet.
    infos = [
        path for kind in ("", "_cu*") for path in folder.parent.glob(f"mxnet{kind}-*.dist-info")
    ]
    return sorted(info.name.rsplit("-", 2)[0].replace("_", "-") for info in infos)


def need_cuda() -> bool:
    """Return whether an installed wheel of MXNet needs CUDA."""
    return any("-cu" in name for name in installed())


def missing_libraries() -> list[str]:
    """Return the names of gcc's libraries that the system's loader does not load."""
    missing = []
    for name in GCC_PACKAGES:
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(name)
    return missing


if __name__ == "__main__":
    print(*(GCC_PACKAGES[name] for name in missing_libraries()))
