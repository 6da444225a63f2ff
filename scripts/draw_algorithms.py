"""Draw the pictures of docs/algorithms.md from the algorithms' plans.

    python scripts/draw_algorithms.py            # write docs/pictures/<algorithm>.svg
    python scripts/draw_algorithms.py --check    # write nothing; do the pictures show the plans?

Every algorithm with a plan is drawn for 4 devices, halving-doubling for 6 as well. --check compares
the arrows and the words in the pictures, not their bytes, which differ between matplotlib versions.

Exit status: 0, all is written or right; 1, the files named differ from their plans or are missing.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Sequence

from gluonpar.collectives import ALGORITHMS, trace

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
NUM_DEVICES = 4
MORE = {"halving-doubling-6": ("halving-doubling", 6)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="compare only, and name what differs")
    parser.add_argument(
        "--folder",
        type=Path,
        default=PICTURES,
        help="where the pictures are (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if args.check:
        return check(args.folder)
    draw(args.folder)
    return 0


def wanted() -> dict[str, tuple[str, int]]:
    """By the picture's name, the algorithm and the number of devices that it shows."""
    plans = [name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None]
    return {**{name: (name, NUM_DEVICES) for name in plans}, **MORE}


def draw(folder: Path) -> None:
    """Write all pictures into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (algorithm, num_devices) in wanted().items():
        trace(algorithm, num_devices).draw(folder / f"{name}.svg")


def check(folder: Path) -> int:
    """Name the pictures in ``folder`` that are not what would be drawn; 1 if there are any."""
    with tempfile.TemporaryDirectory() as fresh:
        draw(Path(fresh))
        names = sorted(
            {path.name for place in (folder, Path(fresh)) for path in place.glob("*.svg")}
        )
        wrong = [name for name in names if content(folder / name) != content(Path(fresh) / name)]
    for name in wrong:
        print(f"{folder / name} is not what its plan gives", file=sys.stderr)
    if wrong:
        print("to draw them again: python scripts/draw_algorithms.py", file=sys.stderr)
    return 1 if wrong else 0


def content(path: Path) -> list[str] | None:
    """The arrows of a picture by their ids, and its words; None if there is no such file."""
    if not path.exists():
        return None
    return sorted(re.findall(r'id="hop-[^"]*"|(?<=>)[^<>]+(?=</text>)', path.read_text("utf-8")))


if __name__ == "__main__":
    sys.exit(main())
