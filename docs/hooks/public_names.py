"""What the package's source says in public: its names, their docstrings, what those refer to.

Public is what an ``__all__`` lists; a reference page names it after ``:::``. The source is read and
never imported, so this needs neither MXNet nor MkDocs.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Iterator, NamedTuple

ROLE = re.compile(r":(?:class|data|func|meth|mod):`([\w.]+)`")
IDENTIFIER = re.compile(r"^::: (\S+)$", re.M)
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Found(NamedTuple):
    """Something defined at ``path``: its docstring, and the public names inside it."""

    path: str
    docstring: str | None
    members: tuple[str, ...] = ()


class Source:
    """A package's modules, parsed."""

    def __init__(self, package: Path) -> None:
        self._trees: dict[str, ast.Module] = {}
        for file in sorted(package.rglob("*.py")):
            name = ".".join(file.relative_to(package.parent).with_suffix("").parts)
            name = name[: -len(".__init__")] if name.endswith(".__init__") else name
            self._trees[name] = ast.parse(file.read_text("utf-8"))

    def public(self) -> Iterator[str]:
        """Every name of every ``__all__``, after its module's."""
        for module, tree in self._trees.items():
            for node in tree.body:
                if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]:
                    yield from (f"{module}.{name}" for name in ast.literal_eval(node.value))

    def find(self, name: str) -> Found | None:
        """What the dotted ``name`` means, through all imports; None if there is no such thing."""
        owner, _, last = name.rpartition(".")
        if not owner:
            return self._module(name)
        found = self._inside(owner, last) if owner in self._trees else None
        if found is None and "." in owner:
            holder = self.find(owner)
            found = holder and self._inside(holder.path, last)
        return found

    def docstrings(self) -> Iterator[tuple[str, str]]:
        """Path and docstring of every module, class and function, private ones too."""
        for module, tree in self._trees.items():
            yield from _docstrings(module, tree)

    def refers_to(self, role: str, path: str) -> Found | None:
        """What a role in the docstring of ``path`` means: looked for from the inside outwards."""
        places = path.split(".")
        for depth in range(len(places), -1, -1):
            found = self.find(".".join([*places[:depth], role]))
            if found is not None:
                return found
        return self.find(f"{places[0]}.{role}")

    def _inside(self, holder: str, name: str) -> Found | None:
        """What the module or class ``holder`` calls ``name``; else, its module of that name."""
        body, path = self._body(holder), f"{holder}.{name}"
        for node, following in zip(body, [*body[1:], None]):
            if isinstance(node, _DEFINITIONS) and node.name == name:
                members = _members(node) if isinstance(node, ast.ClassDef) else ()
                return Found(path, ast.get_docstring(node), members)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _targets(node):
                return Found(path, _string(following))
            if isinstance(node, ast.ImportFrom) and node.module in self._trees:
                for alias in node.names:
                    if name == (alias.asname or alias.name) and node.module != holder:
                        return self._inside(node.module, alias.name)
        return self._module(path)

    def _module(self, path: str) -> Found | None:
        tree = self._trees.get(path)
        return tree and Found(path, ast.get_docstring(tree), _members(tree))

    def _body(self, path: str) -> list[ast.stmt]:
        """The statements of a module or class."""
        if path in self._trees:
            return list(_statements(self._trees[path]))
        owner, _, last = path.rpartition(".")
        found = [n for n in self._body(owner) if isinstance(n, _DEFINITIONS) and n.name == last]
        return found[0].body if found and isinstance(found[0], ast.ClassDef) else []


def missing(source: Source, pages: dict[str, str]) -> list[str]:
    """What is wrong with the reference ``pages`` (text by name), a sentence each."""
    wrong, shown = [], {}
    for page, text in pages.items():
        for name in IDENTIFIER.findall(text):
            found = source.find(name)
            if found is None:
                wrong.append(f"{page}: there is no {name}")
            elif found.path in shown:
                wrong.append(f"{page}: {name} is on {shown[found.path]} already")
            else:
                shown[found.path] = page
                wrong += _undocumented(source, name, found)
    for name in source.public():
        found = source.find(name)
        if found is None:
            wrong.append(f"{name} is in __all__, and there is no such thing")
        elif not covers(shown, found.path):
            wrong.append(f"{name} is public and on no page of the reference")
    for path, text in source.docstrings():
        for role in ROLE.findall(text):
            if source.refers_to(role, path) is None:
                wrong.append(f"{path}: its docstring refers to {role}, and there is no such thing")
    return wrong


def covers(shown: dict[str, str], path: str) -> bool:
    """Whether one of the paths ``shown`` is this one, or has it inside."""
    return any(f"{path}.".startswith(f"{outer}.") for outer in shown)


def shown_on(source: Source, pages: dict[str, str]) -> dict[str, str]:
    """Page by path of all that the pages name."""
    found = ((source.find(n), p) for p, text in pages.items() for n in IDENTIFIER.findall(text))
    return {what.path: page for what, page in found if what is not None}


def _undocumented(source: Source, name: str, found: Found) -> Iterator[str]:
    if not found.docstring:
        yield f"{name} has no docstring"
    for member in found.members:
        inside = source.find(f"{found.path}.{member}")
        if inside is not None:
            yield from _undocumented(source, f"{name}.{member}", inside)


def _members(tree: ast.Module | ast.ClassDef) -> tuple[str, ...]:
    """Public functions, methods and classes; fields and constants are their owner's to explain."""
    names = (node.name for node in tree.body if isinstance(node, _DEFINITIONS))
    return tuple(name for name in names if not name.startswith("_"))


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """A module's statements, and those inside its ``if`` statements (``if TYPE_CHECKING:``)."""
    for node in tree.body:
        if isinstance(node, ast.If):
            yield from node.body
        else:
            yield node


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _string(node: ast.stmt | None) -> str | None:
    """The docstring of an assignment: the string that stands below it."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _docstrings(path: str, tree: ast.AST) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(tree)
    if text:
        yield path, text
    for node in tree.body:
        if isinstance(node, _DEFINITIONS):
            yield from _docstrings(f"{path}.{node.name}", node)
