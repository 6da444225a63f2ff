"""The site's own part of MkDocs: what stops a build, and docstrings as Markdown.

MkDocs loads this file for its events, and mkdocstrings again for the class at the end.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import griffe
import public_names  # MkDocs loads this file first, and finds it beside it

ROOT = Path(__file__).resolve().parents[2]
FROM_THE_NET = re.compile(
    r"<(?:script|img|iframe|link rel=.?stylesheet)[^>]*(?:src|href)=.?https?:"
)

log = logging.getLogger("mkdocs.hooks.pages")  # with `strict: true` its warnings end the build


def on_config(config):
    """Warn of whatever is missing in the reference."""
    for sentence in public_names.missing(_source(), _pages()):
        log.warning(sentence)
    return config


def on_post_page(output: str, page, config) -> str:
    """Warn of what a reader's browser would fetch from elsewhere."""
    for tag in FROM_THE_NET.findall(output):
        log.warning("%s fetches something from the net: %s", page.file.src_uri, tag)
    return output


def _source() -> public_names.Source:
    return public_names.Source(ROOT / "gluonpar")


def _pages() -> dict[str, str]:
    folder = ROOT / "docs" / "api"
    return {f"docs/api/{p.name}": p.read_text("utf-8") for p in sorted(folder.glob("*.md"))}


class Docstrings(griffe.Extension):
    """Docstrings as Markdown: their roles become links, their doctests blocks of code."""

    def __init__(self) -> None:
        super().__init__()
        self._source = _source()
        self._shown = public_names.shown_on(self._source, _pages())

    def on_instance(self, *, obj, **_) -> None:
        """Change the docstring of everything that is read from the source."""
        if obj.docstring is not None:
            text = public_names.ROLE.sub(
                lambda role: self._link(role, obj.path), obj.docstring.value
            )
            obj.docstring.value = _fenced(text)

    def _link(self, role: re.Match, path: str) -> str:
        """A link to what has a place on a page; what has none is code."""
        found = self._source.refers_to(role[1], path)
        if found is None or not public_names.covers(self._shown, found.path):
            return f"`{role[1]}`"
        return f"[`{role[1]}`][{found.path}]"


def _fenced(text: str) -> str:
    """Put each doctest, up to the empty line below it, between fences."""
    lines, inside = [], False
    for line in [*text.splitlines(), ""]:
        if line.startswith(">>> ") and not inside:
            lines.append("```pycon")
            inside = True
        elif not line and inside:
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join(lines)
