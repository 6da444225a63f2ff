"""README, docs and docstrings: their code runs, their commands are accepted, nothing is missing.

`make docs` builds the site and checks its links.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib.metadata
import inspect
import json
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from gluonpar import __main__ as command
from gluonpar.collectives import ALGORITHMS
from gluonpar.training.run import Configuration
from tests.support import doc_blocks, processes
from tests.support.dotted_names import definition, resolve

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(command.__file__).parent  # in the checkout, or where the wheel is installed
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    if path.name != "CHANGELOG.md"  # names what is gone, too
}
NOTEBOOKS = [f"notebooks/multi_gpu_walkthrough{end}.ipynb" for end in ("", ".zh-CN")]
PROGRAMS = {
    str(path.relative_to(ROOT)): ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    for folder in ("scripts", "tools", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
PYTHON = [
    pytest.param(name, block, id=f"{name}:{block.line}")
    for name, text in PAGES.items()
    for block in doc_blocks.blocks(text)
    if block.language == "python" and not block.title
]


@functools.lru_cache(None)
def outcomes(name):
    """Run a page's blocks in one process, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        return doc_blocks.outcomes(ROOT / name, folder)


class TestBlocks:
    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "block"), PYTHON)
    def test_a_block_runs_and_prints_what_is_shown_below_it(self, name, block):
        if not doc_blocks.can_run(block):
            pytest.skip("MXNet computes in bfloat16 on processors with AVX-512 only")
        outcome = outcomes(name)[block.line]
        assert outcome["error"] is None, outcome["error"]
        assert outcome["printed"] == (block.output or "")

    @pytest.mark.parametrize("name", PAGES)
    def test_a_block_with_a_files_name_as_title_quotes_lines_of_that_file(self, name):
        for block in doc_blocks.blocks(PAGES[name]):
            if block.title:
                text = (ROOT / block.title).read_text("utf-8")
                indented = [textwrap.indent(block.text, " " * n) for n in range(0, 20, 4)]
                assert any(f"\n{lines}" in text for lines in indented), f"line {block.line}"


class Accepted(BaseException):
    """Raised in place of running a command whose arguments were accepted."""


def commands(text):
    """Yield the commands in blocks, indented lines and code spans that call a program of ours."""
    text = text.replace("\\\n", " ")
    lines = [line for block in doc_blocks.blocks(text) for line in block.text.splitlines()]
    rest = doc_blocks.FENCE.sub("", text)
    lines += re.findall(r"^    .*$|^python3? (?:scripts|tools|examples)/.*$", rest, re.M)
    lines += [span.replace("\n", " ") for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", rest)]
    script = r"(?:scripts|tools|examples)/\w+\.py"
    program = rf"python3? ((?:{script}|-m (?:gluonpar|benchmarks\.\w+)\b)[^#;|&)]*)"
    console = rf"(?:^| )(gluonpar (?:{'|'.join(command.COMMANDS)})\b[^#;|&)]*)"
    for line in lines:
        yield from re.findall(program, line)
        yield from (f"-m {call}" for call in re.findall(console, line) if f"-m {call}" not in line)


CALLS = [
    pytest.param(call.strip(), id=f"{place}: {call.strip()}")
    for place, text in {**PAGES, **PROGRAMS}.items()
    for call in dict.fromkeys(commands(text))
]


def parse(call, monkeypatch):
    """Let a command parse its arguments and stop there; K and N stand for numbers."""
    real = argparse.ArgumentParser.parse_known_args

    def parse_known_args(parser, *arguments):
        options, unknown = real(parser, *arguments)
        if unknown:
            return options, unknown
        raise Accepted

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    first, *rest = ["2" if word in ("K", "N") else word for word in shlex.split(call)]
    monkeypatch.setattr(sys, "argv", [first, *rest[first == "-m" :]])
    if first == "-m" and rest[0] == "gluonpar":
        command.main()
    program = ROOT / (rest[0].replace(".", "/") if first == "-m" else first)
    program = program if program.is_dir() else program.with_suffix(".py")
    runpy.run_path(str(program), run_name="__main__")


class TestCommands:
    @pytest.mark.parametrize("call", CALLS)
    def test_a_command_exists_and_accepts_its_arguments(self, call, monkeypatch, capfd):
        if call == "-m gluonpar":  # has no arguments to parse
            return
        with pytest.raises(Accepted):
            parse(call, monkeypatch)

    def test_targets_of_make_exist(self):
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
        named = set()
        for text in PAGES.values():
            named |= set(re.findall(r"`make ([a-z][a-z-]*)", text))
            for block in doc_blocks.blocks(text):
                named |= set(re.findall(r"^make ([a-z][a-z-]*)", block.text, re.M))
        assert {"train", "test"} <= named <= targets

    def test_extras_exist(self):
        extras = re.findall(r"(?:gluonpar|'\.)\[([\w,]+)\]", "\n".join(PAGES.values()))
        named = {extra for several in extras for extra in several.split(",")}
        known = set(importlib.metadata.metadata("gluonpar").get_all("Provides-Extra"))
        assert {"cpu", "cu112"} <= named <= known

    @pytest.mark.slow
    def test_the_reference_lists_every_option_of_a_run(self):
        rows = dict(
            re.findall(r"^\| `(\w+)` \| `?(--[\w-]+)?", PAGES["docs/api/training.md"], re.M)
        )
        assert set(rows) == {field.name for field in dataclasses.fields(Configuration)}
        text = processes.end("-m", "gluonpar", "train", "--help").stdout
        options = set(re.findall(r"^  (--[\w-]+)", text, re.M)) - {"--help", "--version"}
        assert len(options) > 10 and options == set(rows.values()) - {""}


def text_of(path):
    """A page, or the text cells of a notebook, without its code."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return doc_blocks.FENCE.sub("", text)


DOTTED = re.compile(r"(?<![\w./-])gluonpar(?:\.[A-Za-z_]\w*)+(?!-)")
OPERATIONS = {f"gluonpar.{name}" for name in "host update allreduce_update all_finite heap".split()}


def docstrings(path):
    tree = ast.parse(path.read_text("utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    return "\n".join(ast.get_docstring(node) or "" for node in nodes)


def test_every_dotted_name_in_pages_notebooks_and_docstrings_can_be_imported():
    texts = {**PAGES, **{name: text_of(ROOT / name) for name in NOTEBOOKS}}
    folders = [PACKAGE, *(ROOT / name for name in ("benchmarks", "examples", "scripts", "tools"))]
    texts.update((path, docstrings(path)) for each in folders for path in each.rglob("*.py"))
    wrong, found = [], 0
    for place, text in texts.items():
        for dotted in sorted({*DOTTED.findall(text)} - OPERATIONS):
            found += 1
            try:
                resolve(dotted)
            except (ImportError, AttributeError) as error:
                wrong.append(f"{place}: {dotted}: {error}")
    assert wrong == []
    assert found > 100


def anchors(path):
    """The anchors of the headings: in a page as on code forges, in a notebook as in JupyterLab."""
    titles = [title.strip() for title in re.findall(r"^#+ (.+)$", text_of(path), re.M)]
    if path.suffix == ".ipynb":
        return [title.replace("`", "").replace(" ", "-") for title in titles]
    return [re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles]


@pytest.mark.parametrize("name", [*PAGES, *NOTEBOOKS])
def test_links_lead_to_files_and_headings(name):
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text_of(ROOT / name))
    assert links or name not in NOTEBOOKS
    for target, anchor in links:
        if target.startswith(("http:", "https:")):
            continue
        path = ((ROOT / name).parent / target).resolve() if target else ROOT / name
        assert path.exists() and ROOT in path.parents, target
        if path.suffix == ".html":  # the anchor is settings of the page
            assert dict(parse_qsl(anchor)).get("algorithm", "ring") in ALGORITHMS, anchor
        elif anchor and not anchor.startswith("gluonpar."):
            assert anchor in anchors(path), f"{target}#{anchor}"


def test_every_title_of_the_navigation_has_a_chinese_one():
    titles = re.findall(r"^ +- ([A-Z][^:\n]*):", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    translated = runpy.run_path(str(ROOT / "docs" / "hooks" / "chinese.py"))["TITLES"]
    assert len(titles) > 10 and set(titles) == set(translated)


@pytest.mark.parametrize("package", ["gluonpar", "gluonpar.collectives", "gluonpar.cluster"])
def test_every_public_name_is_on_a_page_of_the_reference(package):
    reference = "\n".join(text for name, text in PAGES.items() if name.startswith("docs/api/"))
    shown = re.findall(r"^::: (\S+)$", reference, re.M)
    definitions, things = {definition(name) for name in shown}, [resolve(name) for name in shown]
    assert len(definitions) == len(shown), "a name is on two pages"
    for name in resolve(package).__all__:
        thing, path = resolve(f"{package}.{name}"), definition(f"{package}.{name}")
        inside = any(f"{path}.".startswith(f"{outer}.") for outer in definitions)
        assert inside or any(thing is other for other in things) or inspect.ismodule(thing), path


def test_the_chinese_readme_has_the_same_blocks_sections_and_figures():
    ours, theirs = PAGES["README.md"], PAGES["README.zh-CN.md"]
    assert doc_blocks.FENCE.findall(theirs) == doc_blocks.FENCE.findall(ours)
    assert theirs.count("\n## ") == ours.count("\n## ")
    figures = [sorted(re.findall(r"\d+(?:[.,-]\d+)*", text)) for text in (ours, theirs)]
    assert figures[0] == figures[1]


@pytest.mark.slow
def test_an_algorithm_takes_its_file_and_one_line(tmp_path):
    """As CONTRIBUTING.md says, whose recipe is carried out on a copy."""
    shutil.copytree(PACKAGE, tmp_path / "gluonpar")
    for name in ("plans", "support"):
        shutil.copytree(ROOT / "tests" / name, tmp_path / "tests" / name)
    for name in ("__init__.py", "conftest.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    line, texts = "gluonpar/plans/algorithms/line.py", doc_blocks.blocks(PAGES["CONTRIBUTING.md"])
    (code,) = [block.text for block in texts if block.text.startswith('"""line:')]
    (tmp_path / line).write_text(code)
    with (tmp_path / line).with_name("__init__.py").open("a") as file:
        file.write("from gluonpar.plans.algorithms import line\n")
    options = ["-p", "no:cacheprovider", "-k", "line"]
    done = processes.end(
        *("-m", "pytest", *options, "tests/plans/test_plans.py", line), cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    assert f"\n{line} ." in done.stdout  # its example
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 10
