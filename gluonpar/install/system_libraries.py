"""The libraries of gcc that MXNet's wheels link to but do not contain, and their Debian packages.

Minimal systems lack the first two. ``make`` runs this file before anything is installed::

    python -I gluonpar/install/system_libraries.py    # prints the packages that are missing
"""

from __future__ import annotations

import ctypes

PACKAGES = {
    "libgomp.so.1": "libgomp1",
    "libquadmath.so.0": "libquadmath0",
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
}


def missing() -> list[str]:
    """Return the names of those that the system's loader does not load."""
    return [name for name in PACKAGES if not _loads(name)]


def remedy(names: list[str]) -> str:
    """Return the command that installs these libraries."""
    packages = " ".join(PACKAGES[name] for name in names)
    return f"install gcc's {', '.join(names)}; on Debian and Ubuntu: apt-get install {packages}"


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(*(PACKAGES[name] for name in missing()))
