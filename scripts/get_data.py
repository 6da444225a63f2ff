"""Find or download Fashion-MNIST, and print where it is.

    python scripts/get_data.py                    # find, download, or install Debian's package
    python scripts/get_data.py --data-dir FOLDER  # check the four files in FOLDER, only

Looks in the same folders as training. If no mirror can be reached, there is an apt-get and the user
is root, it runs `apt-get install -y dataset-fashion-mnist`.

Exit status: 0, the data are complete and correct; 1, they are not; 2, gluonpar cannot be imported.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Sequence

if TYPE_CHECKING:
    from gluonpar.training.data.dataset import Dataset

INSTALL = ["apt-get", "install", "-y", "dataset-fashion-mnist"]
UPDATE = ["apt-get", "update"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data-dir", metavar="FOLDER", help="the only folder to look in; nothing is installed then"
    )
    args = parser.parse_args(argv)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout not installed
    try:
        from gluonpar.training.data.dataset import load
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        dataset = obtain(load, args.data_dir)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{dataset.name}: {dataset.source}")
    return 0


def obtain(load: Callable[..., Dataset], data_dir: str | None) -> Dataset:
    """Return what ``load`` finds, after installing Debian's package if it finds nothing."""
    try:
        return load(data_dir=data_dir)
    except FileNotFoundError:
        if data_dir is not None or shutil.which("apt-get") is None or os.geteuid() != 0:
            raise
        if run(INSTALL) != 0 and (run(UPDATE) != 0 or run(INSTALL) != 0):
            raise
    return load()


def run(command: Sequence[str]) -> int:
    """Print and run a command without interaction; return its exit status."""
    print(f"running: {' '.join(command)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
