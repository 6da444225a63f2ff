"""The pictures that only the site shows, drawn when it is built: plans, and how their times grow.

A page has ``<!-- picture: NAME.svg: alternative text -->`` in the place of such a picture, so that
a code forge, which has no file of it, shows nothing there.
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "notebooks"), str(ROOT / "tools")]

import drawing  # noqa: E402 - of notebooks
from pictures import growth  # noqa: E402 - of tools

from gluonpar.collectives import ALGORITHMS  # noqa: E402

PLACE = re.compile(r"<!-- picture: (\S+\.svg): (.*?) -->", re.S)


def on_files(files, config):
    """Add the pictures that docs/pictures does not have."""
    for name, content in _drawn().items():
        if files.get_file_from_path(f"pictures/{name}") is None:
            files.append(File.generated(config, f"pictures/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Show the pictures; with `strict: true` one that is not drawn ends the build."""
    return PLACE.sub(r"![\2](pictures/\1)", markdown)


@functools.lru_cache(None)  # `mkdocs serve` builds the site again at every change
def _drawn() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        for name, plan in ALGORITHMS.items():
            if plan is not None:
                drawing.draw(name, 4, Path(folder, f"{name}.svg"))
        drawing.draw("halving-doubling", 6, Path(folder, "halving-doubling-6.svg"))
        growth.draw(Path(folder, "growth.svg"))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
