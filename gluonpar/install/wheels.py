"""The installed wheels of MXNet, found without importing it, and the libraries of gcc they link to.

Minimal systems lack the first two of these libraries. ``make`` runs this file before anything is
installed::

    python -I gluonpar/install/wheels.py    # prints the Debian packages that are missing
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from pathlib import Path

# mxnet, mxnet-cu112, mxnet-cu92mkl, ... all install the package ``mxnet``; mxnet-model-server and
# other packages whose names begin with mxnet do not.
_NAMES = re.compile(r"mxnet(-(cu\d+(mkl)?|mkl|native))?")

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
    """Return the names of the installed wheels of MXNet; none if it was installed otherwise.

    Several wheels overwrite each other's files.
    """
    folder = package()
    if folder is None:
        return []
    infos = folder.parent.glob("mxnet*-*.dist-info")
    names = {info.name.rsplit("-", 2)[0].replace("_", "-") for info in infos}
    return sorted(name for name in names if _NAMES.fullmatch(name))


def with_cuda(names: list[str]) -> bool:
    """Return whether one of these wheels needs CUDA."""
    return any("-cu" in name for name in names)


def missing_libraries() -> list[str]:
    """Return the names of gcc's libraries that the system's loader does not load."""
    return [name for name in GCC_PACKAGES if not _loads(name)]


def remedy(libraries: list[str]) -> str:
    """Return the command that installs these libraries of gcc."""
    packages = " ".join(GCC_PACKAGES[name] for name in libraries)
    return f"install gcc's {', '.join(libraries)}; on Debian and Ubuntu: apt-get install {packages}"


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(*(GCC_PACKAGES[name] for name in missing_libraries()))
