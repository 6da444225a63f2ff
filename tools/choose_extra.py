"""Print which MXNet suits this machine: the extra `cu112` (GPUs) or `cpu`.

    python tools/choose_extra.py                          # prints one word; the reason on stderr
    pip install -e ".[$(python tools/choose_extra.py)]"   # as `make train` does

Needs only the standard library. Exit code 0; 2 if it is given arguments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Sequence

ROOT = Path(__file__).resolve().parents[1]


def choose() -> tuple[str, str]:
    """Return the extra, and the reason in words."""
    sys.path.insert(0, str(ROOT))  # gluonpar is not installed yet, nor is MXNet
    from gluonpar.install import driver

    reason = driver.why_unusable()
    if reason:
        return "cpu", reason
    gpus = driver.gpus()
    usable = "; ".join(str(gpu) for gpu in gpus if driver.usable(gpu))
    unusable = "; ".join(str(gpu) for gpu in gpus if not driver.usable(gpu))
    return "cu112", usable + (f" (not usable: {unusable}; {driver.KERNELS})" if unusable else "")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the extra to stdout and the reason to stderr."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    extra, reason = choose()
    print(f"{extra}: {reason}", file=sys.stderr)
    print(extra)


if __name__ == "__main__":
    main()
