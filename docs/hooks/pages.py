"""Extensions of MkDocs for this site: formulas, tables, a check of every page, and docstrings.

MkDocs loads this file for the functions ``on_...``, mkdocstrings loads it for :class:`Docstrings`.
"""

from __future__ import annotations

import html
import logging
import re

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File
from mkdocs.structure.nav import Link

FROM_THE_NET = re.compile(
    r"<(?:script|img|iframe|link rel=.?stylesheet)[^>]*(?:src|href)=.?https?:"
)
ROLE = re.compile(r":(?:class|data|func|meth|mod):`(~?)([\w.]+)`")
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.M)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[([](.*?)\\[])]</\1>', re.S)
TABLE = re.compile(r"<table>.*?</table>", re.S)
HEAD = re.compile(r"<thead>.*?</thead>\s*", re.S)
ROW, CELL = re.compile(r"<tr>.*?</tr>", re.S), re.compile(r"<t[dh]\b[^>]*>(.*?)</t[dh]>", re.S)
LONG = 40  # characters in a cell, not the first, of a table that is stacked on a narrow screen
LABEL = 12  # characters in a first cell that would be narrower than its words

log = logging.getLogger("mkdocs.hooks.pages")  # with `strict: true` a warning ends the build


def on_files(files, config):
    """Let the page that is not made from Markdown link to those that are: by their names here."""
    page = files.get_file_from_path("step-by-step.html")
    linked = re.sub(r'(href="[\w-]+)\.md"', r'\1.html"', page.content_string)
    files.remove(page)
    files.append(File.generated(config, page.src_uri, content=linked))
    return files


def on_nav(nav, config, files):
    """Let the entry in Chinese open the page in Chinese; in mkdocs.yml that would name no file."""
    section = next(section for section in nav.items if section.title == "中文")
    for i, item in enumerate(section.children):
        if item.file.src_uri == "step-by-step.html":
            section.children[i] = Link("全归约，一步一步看", "step-by-step.html#lang=zh")
            section.children[i].parent = section
    return nav


def on_page_content(html: str, page, config, files) -> str:
    """Turn formulas into MathML, which browsers show without a script, and mark long tables."""
    return TABLE.sub(_table, FORMULA.sub(_formula, html))


def on_post_page(output: str, page, config) -> str:
    """Warn of everything that a reader's browser would fetch from another server."""
    for tag in FROM_THE_NET.findall(output):
        log.warning("%s fetches something from the net: %s", page.file.src_uri, tag)
    return output


def _formula(formula: re.Match) -> str:
    display = "block" if formula[1] == "div" else "inline"
    return convert(html.unescape(formula[2]), display=display)


def _table(table: re.Match) -> str:
    """A table for the style sheet: ``stacked``, with named cells, if it has text in later columns.

    Else it is ``wide``, and ``labelled`` if its first column has long cells. A head without words,
    which Markdown demands, is left out.
    """
    head, *rows = (CELL.findall(row) for row in ROW.findall(table[0]))
    shown = table[0] if any(head) else HEAD.sub("", table[0])
    texts = [[re.sub("<[^>]*>", "", cell) for cell in row] for row in rows if row]
    if not any(len(cell) > LONG for row in texts for cell in row[1:]):
        labelled = " labelled" if any(len(row[0]) > LABEL for row in texts) else ""
        return f'<div class="wide{labelled}">{shown}</div>'
    names = [html.escape(re.sub("<[^>]*>", "", name), quote=True) for name in head]
    cells = iter(names * len(rows))
    named = re.sub("<td", lambda cell: f'<td data-name="{next(cells)}"', shown)
    return f'<div class="stacked">{named}</div>'


class Docstrings(griffe.Extension):
    """Convert roles in docstrings to links, doctests to blocks of code, and add parameters."""

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        """Convert every docstring of the package once it is loaded."""
        _convert(pkg, pkg)


def _convert(obj: griffe.Object, package: griffe.Module) -> None:
    if obj.docstring is not None:
        parameters = _parameters(obj)
        text = ROLE.sub(lambda role: _link(role[1], role[2], obj, package), obj.docstring.value)
        obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", text)
        if parameters:
            obj.docstring.parsed.append(griffe.DocstringSectionParameters(parameters))
    for member in obj.members.values():
        if not member.is_alias:
            _convert(member, package)


def _parameters(obj: griffe.Object) -> list[griffe.DocstringParameter]:
    """The parameters of a function or class, each with the first sentence that names it."""
    init = obj.members.get("__init__") if obj.is_class else obj
    sentences = re.split(r"(?<=[.:])\s+", re.sub(r"\n\n", ". ", obj.docstring.value))
    found = []
    for parameter in getattr(init, "parameters", ()):
        if parameter.name in ("self", "cls") or parameter.name.startswith("_"):
            continue
        naming = [sentence for sentence in sentences if f"``{parameter.name}``" in sentence]
        found.append(
            griffe.DocstringParameter(
                parameter.name,
                description=naming[0] if naming else "",
                annotation=parameter.annotation,
                value=parameter.default,
            )
        )
    return found if len(found) > 1 else []


def _link(tilde: str, name: str, obj: griffe.Object, package: griffe.Module) -> str:
    """A link to ``name`` as ``obj`` sees it, or just its name if no page shows it."""
    shown = name.rpartition(".")[2] if tilde else name
    first, _, rest = name.partition(".")
    for scope in (obj, package):
        try:
            path = package.path if first == package.path else scope.resolve(first)
            thing = package.modules_collection[f"{path}.{rest}" if rest else path]
        except (KeyError, griffe.GriffeError):
            continue
        target = thing.canonical_path
        return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'
    log.warning("%s: its docstring refers to %s, which does not exist", obj.path, name)
    return f"`{shown}`"
