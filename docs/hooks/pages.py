"""Extensions of MkDocs for this site: a check of every page, and docstrings converted to Markdown.

MkDocs loads this file for ``on_post_page``, and mkdocstrings loads it for :class:`Docstrings`.
"""

from __future__ import annotations

import logging
import re

import griffe

FROM_THE_NET = re.compile(
    r"<(?:script|img|iframe|link rel=.?stylesheet)[^>]*(?:src|href)=.?https?:"
)
ROLE = re.compile(r":(?:class|data|func|meth|mod):`(~?)([\w.]+)`")
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.M)

log = logging.getLogger("mkdocs.hooks.pages")  # with `strict: true` a warning ends the build


def on_post_page(output: str, page, config) -> str:
    """Warn of everything that a reader's browser would fetch from another server."""
    for tag in FROM_THE_NET.findall(output):
        log.warning("%s fetches something from the net: %s", page.file.src_uri, tag)
    return output


class Docstrings(griffe.Extension):
    """Convert roles in docstrings to links, and doctests to blocks of code."""

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        """Convert every docstring of the package once it is loaded."""
        _convert(pkg, pkg)


def _convert(obj: griffe.Object, package: griffe.Module) -> None:
    if obj.docstring is not None:
        text = ROLE.sub(lambda role: _link(role[1], role[2], obj, package), obj.docstring.value)
        obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", text)
    for member in obj.members.values():
        if not member.is_alias:
            _convert(member, package)


def _link(tilde: str, name: str, obj: griffe.Object, package: griffe.Module) -> str:
    """A link to ``name`` as ``obj`` sees it, or just its name if no page shows it."""
    shown = name.rpartition(".")[2] if tilde else name
    first, _, rest = name.partition(".")
    for scope in (obj, package):
        try:
            path = package.path if first == package.path else scope.resolve(first)
            found = package.modules_collection[f"{path}.{rest}" if rest else path]
        except (KeyError, griffe.GriffeError):
            continue
        target = found.canonical_path
        return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'
    log.warning("%s: its docstring refers to %s, which does not exist", obj.path, name)
    return f"`{shown}`"
