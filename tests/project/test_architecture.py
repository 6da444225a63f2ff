"""Rules for the package as a whole; `make lint` checks the order of imports."""

from __future__ import annotations

import ast
import importlib
import json
import pathlib
import re
import types
from collections import Counter

import pytest
from dotted_names import resolve

import gluonpar

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = pathlib.Path(gluonpar.__file__).parent  # in the checkout, or where the wheel is installed
SOURCES = sorted(PACKAGE.rglob("*.py"))
OPERATIONS = {
    f"gluonpar.{name}" for name in ("host", "update", "allreduce_update", "all_finite", "heap")
}
DOTTED = re.compile(r"(?<![\w./-])gluonpar(?:\.[A-Za-z_]\w*)+(?!-)")


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def docstrings(path):
    tree = ast.parse(path.read_text("utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    return "\n".join(ast.get_docstring(node) or "" for node in nodes)


def notebook_text(path):
    """The words of a notebook: its code is run by test_notebook.py."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def documents():
    """By its name, the text of every page, notebook and module that readers see."""
    pages = [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]  # has former names
    for path in [*pages, *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").rglob("*.md")]:
        yield path.relative_to(ROOT), path.read_text("utf-8")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        yield path.relative_to(ROOT), notebook_text(path)
    for path in SOURCES:
        yield path.relative_to(PACKAGE.parent), docstrings(path)
    for folder in ("benchmarks", "examples", "scripts", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            yield path.relative_to(ROOT), docstrings(path)


# Private names that are documented: of Python's modules and of named tuples. Our own Trainer's
# ``_updater`` is read in gluonpar.checkpoint, which may not import the Trainer.
DOCUMENTED = {"_exit", "_current_frames", "_replace", "_asdict", "_fields"}
OUR_OWN = {"_updater"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def of_self(attribute):
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def foreign_private_names(source):
    """The private attributes of objects other than self that the module itself does not define.

    And the private names and modules that it imports from MXNet.
    """
    nodes, known = [*ast.walk(ast.parse(source))], DOCUMENTED | OUR_OWN
    used = set()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            known = known | {node.name}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            known = known | {node.attr}
    for node in nodes:
        if isinstance(node, ast.Attribute) and not of_self(node):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mxnet"):
            used |= {*node.module.split("."), *(alias.name for alias in node.names)}
    return {name for name in used - known if is_private(name)}


def test_private_fields_of_mxnet_are_used_in_runtime_only():
    outside = [path for path in SOURCES if path.parent != PACKAGE / "runtime"]
    users = {module_name(path): foreign_private_names(path.read_text("utf-8")) for path in outside}
    assert {module: names for module, names in users.items() if names} == {}


def is_package(dotted):
    return (PACKAGE.parent / dotted.replace(".", "/") / "__init__.py").exists()


# Without the house's own door, which makes names public.
@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p != PACKAGE / "__init__.py"], ids=module_name
)
def test_a_room_is_entered_by_its_door(path):
    """That is its ``__init__``: ``from gluonpar.room import name``, a module's or another."""
    room = path.relative_to(PACKAGE).parts[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("gluonpar.") and module.split(".")[1] != room:
            assert is_package(module) or module.count(".") == 1, module


def test_the_top_level_has_at_most_16_entries():
    entries = [path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]
    entries += [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    assert len(entries) <= 16, sorted(entries)


def test_no_two_modules_and_no_two_public_classes_have_the_same_name():
    modules = [module_name(path).rpartition(".")[2] for path in SOURCES]
    nodes = [node for path in SOURCES for node in ast.parse(path.read_text("utf-8")).body]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    for names in (modules, [name for name in classes if not is_private(name)]):
        assert len(names) > 20
        assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=module_name)
def test_no_function_or_class_hides_a_module(path):
    package = importlib.import_module(module_name(path))
    modules = {p.stem for p in path.parent.glob("*.py")}
    modules |= {p.parent.name for p in path.parent.glob("*/__init__.py")}
    exported = {*vars(package), *getattr(package, "__all__", ())}
    for name in modules & exported:
        assert isinstance(getattr(package, name), types.ModuleType), name


def test_every_dotted_name_in_documents_can_be_imported():
    wrong, found = [], 0
    for place, text in documents():
        for dotted in sorted({*DOTTED.findall(text)} - OPERATIONS):
            found += 1
            try:
                resolve(dotted)
            except (ImportError, AttributeError) as error:
                wrong.append(f"{place}: {dotted}: {error}")
    assert wrong == []
    assert found > 100
