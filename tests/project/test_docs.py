"""README, docs and docstrings: their code runs, their commands and names exist, nothing is missing.

`make docs` builds the site and checks its links and anchors; here the pages are read as they lie.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import doc_blocks
import pytest

import gluonpar
from gluonpar import __main__ as command
from gluonpar.training import command_line
from gluonpar.training.run import Configuration

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
}
REFERENCE = {name: text for name, text in PAGES.items() if name.startswith("docs/api/")}
STATEMENT = re.compile(
    r"^ *(>>> |import \w|from \w+ import|def \w+\(|class \w+.*:$|with .*:$)", re.M
)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


public_names = load(ROOT / "docs" / "hooks" / "public_names.py")
SOURCE = public_names.Source(Path(gluonpar.__file__).parent)


def docstrings():
    yield from SOURCE.docstrings()
    for path in sorted((ROOT / "scripts").glob("*.py")):
        yield f"scripts/{path.name}", ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""


class TestBlocks:
    ALL = [
        pytest.param(name, block, id=f"{name}:{block.line}")
        for name, text in PAGES.items()
        for block in doc_blocks.blocks(text)
        if block.language == "python"
    ]

    @staticmethod
    @functools.lru_cache(None)
    def outcomes(name):
        """A process for the page, in a folder that its blocks may write to."""
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, doc_blocks.__file__, str(ROOT / name)],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=900,
            )
        assert done.returncode == 0, done.stderr
        return {outcome["line"]: outcome for outcome in json.loads(done.stdout)}

    @pytest.mark.parametrize(("name", "block"), ALL)
    def test_a_block_runs_and_prints_what_stands_below_it(self, name, block):
        outcome = self.outcomes(name)[block.line]
        assert outcome["error"] is None, outcome["error"]
        assert outcome["printed"] == (block.output or "")

    def test_readme_and_guide_have_blocks(self):
        names = [param.values[0] for param in self.ALL]
        assert names.count("README.md") >= 3
        assert names.count("docs/guide.md") >= 10

    @pytest.mark.parametrize("name", PAGES)
    def test_what_is_python_is_marked_so_and_else_it_is_a_command_or_output(self, name):
        blocks = doc_blocks.blocks(PAGES[name])
        assert {block.language for block in blocks} <= {"python", "sh", ""}
        assert PAGES[name].count("```") == 2 * len(blocks)
        rest = doc_blocks.FENCE.sub("", PAGES[name])
        others = [block.text for block in blocks if block.language == ""]
        indented = "\n".join(re.findall(r"^    .*$", rest, re.M))
        assert not STATEMENT.search("\n".join([*others, indented]))

    def test_what_is_python_in_docstrings_is_a_doctest(self):
        for path, text in docstrings():
            kept = re.sub(r"^ *>>> .*(\n.+)*", "", text, flags=re.M)
            indented = "\n".join(re.findall(r"^    .*$", kept, re.M))
            assert not STATEMENT.search(indented), path

    def test_no_doctest_is_left_out(self):
        assert [path for path, text in docstrings() if "+SKIP" in text] == []


class TestDocBlocks:
    PAGE = textwrap.dedent(
        """\
        ```python
        from gluonpar.runtime import devices
        x = 2
        print(x)
        ```

        ```
        2
        ```

        ```python
        print(x + 1)
        ```
        words
        ```
        no output of the block above
        ```

        ```python
        import gluonpar
        print(x)
        ```
        """
    )

    def test_blocks_have_their_line_and_the_output_right_below(self):
        found = [(b.language, b.line, b.output) for b in doc_blocks.blocks(self.PAGE)]
        assert [entry for entry in found if entry[0]] == [
            ("python", 1, "2\n"),
            ("python", 11, None),
            ("python", 19, None),
        ]

    def test_a_block_goes_on_from_the_one_before_unless_it_imports_gluonpar(self):
        first, second, third = doc_blocks.run(self.PAGE, "page.md")
        assert (first["printed"], second["printed"]) == ("2\n", "3\n")
        assert first["error"] is second["error"] is None
        assert 'File "page.md", line 21' in third["error"]
        assert "NameError: name 'x' is not defined" in third["error"]


class Accepted(BaseException):
    """Raised instead of running a command whose arguments have been taken."""


def commands(text):
    """The calls of scripts and of the package in code: in blocks, indented lines and spans."""
    text = text.replace("\\\n", " ")
    lines = [line for block in doc_blocks.blocks(text) for line in block.text.splitlines()]
    rest = doc_blocks.FENCE.sub("", text)
    lines += re.findall(r"^    .*$|^python3? scripts/.*$", rest, re.M)
    lines += [span.replace("\n", " ") for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", rest)]
    for line in lines:
        yield from re.findall(r"python3? ((?:scripts/\w+\.py|-m gluonpar\b)[^#;|&)]*)", line)


SEEN = [*PAGES.items(), *docstrings()]
CALLS = [
    pytest.param(call.strip(), id=f"{place}: {call.strip()}")
    for place, text in SEEN
    for call in dict.fromkeys(commands(text))
]


class TestCommands:
    def test_there_are_commands_on_pages_and_in_docstrings(self):
        assert any("README.md" in param.id for param in CALLS)
        assert any("docs/performance.md" in param.id for param in CALLS)
        assert any("scripts/train_lenet.py" in param.id for param in CALLS)

    @pytest.mark.parametrize("call", CALLS)
    def test_a_command_s_script_exists_and_takes_its_arguments(self, call, monkeypatch, capfd):
        self.parse(call, monkeypatch)

    @staticmethod
    def parse(call, monkeypatch):
        """Parse the arguments; K and N stand for numbers."""
        real = argparse.ArgumentParser.parse_args

        def parse_args(parser, argv=None):
            real(parser, argv)
            raise Accepted

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        first, *rest = ["2" if word in ("K", "N") else word for word in shlex.split(call)]
        if first == "-m":
            if rest[1:]:
                with pytest.raises(Accepted):
                    command.main(rest[1:])
            return
        monkeypatch.setattr(sys, "argv", [first, *rest])
        path = ROOT / first
        if first == "tools/choose_extra.py":  # which takes no arguments, and asks nobody
            assert path.exists() and not rest
            return
        with pytest.raises(Accepted):
            runpy.run_path(str(path), run_name="__main__")

    @pytest.mark.parametrize(
        "call", ["scripts/train_lenet.py --num-gpu-s 2", "-m gluonpar verify --fast"]
    )
    def test_an_option_that_is_not_there_is_noticed(self, call, monkeypatch, capfd):
        with pytest.raises(SystemExit):
            self.parse(call, monkeypatch)

    def test_targets_of_make_exist(self):
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
        named = {
            name for text in PAGES.values() for name in re.findall(r"`make ([a-z][a-z-]*)", text)
        }
        named |= {
            name
            for text in PAGES.values()
            for block in doc_blocks.blocks(text)
            for name in re.findall(r"^make ([a-z][a-z-]*)", block.text, re.M)
        }
        assert {"train", "test"} <= named <= targets

    def test_extras_exist(self):
        known = set(importlib.metadata.metadata("gluonpar").get_all("Provides-Extra"))
        named = {
            extra
            for text in PAGES.values()
            for extras in re.findall(r"(?:gluonpar|'\.)\[([\w,]+)\]", text)
            for extra in extras.split(",")
        }
        assert {"cpu", "cu112"} <= named <= known


def things(text):
    """The dotted names of this package in code, up to a call or index."""
    return re.findall(r"`(gluonpar(?:\.[A-Za-z_]\w*)+)", text)


class TestNames:
    @pytest.mark.parametrize("name", PAGES)
    def test_names_in_code_exist(self, name):
        for dotted in things(PAGES[name]):
            if not dotted.endswith((".py", ".NAME")):
                assert SOURCE.find(dotted), dotted

    def test_the_options_are_in_the_table_of_the_reference(self):
        text = PAGES["docs/api/training.md"]
        rows = dict(re.findall(r"^\| `(\w+)` \| `?(--[\w-]+)?", text, re.M))
        fields = {field.name for field in dataclasses.fields(Configuration)}
        assert set(rows) == fields
        parser = command_line.parser("")
        for action in parser._actions:
            if action.dest in fields:
                assert rows[action.dest] == action.option_strings[0]

    @pytest.mark.parametrize("name", PAGES)
    def test_links_lead_to_files_and_headings(self, name):
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", PAGES[name]):
            if target.startswith(("http:", "https:")):
                continue
            path = (ROOT / name).parent / target if target else ROOT / name
            assert path.exists(), target
            if anchor:
                assert anchor in anchors(path.read_text("utf-8")), f"{target}#{anchor}"


def anchors(text):
    """Those of a page's headings; on a page of the reference, its names and their members."""
    titles = re.findall(r"^#+ (.+)$", doc_blocks.FENCE.sub("", text), re.M)
    found = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}
    for name in public_names.IDENTIFIER.findall(text):
        thing = SOURCE.find(name)
        found |= {name, *(f"{name}.{member}" for member in thing.members)}
    return found


class TestReference:
    """What `make docs` refuses, on the package as it is and on one with faults."""

    PACKAGE = {
        "__init__.py": 'from room.walls import paint\n\n__all__ = ["paint"]\n',
        "walls.py": '"""See :func:`paint`."""\n\n\ndef paint():\n    """Paint them."""\n',
    }

    @pytest.fixture
    def room(self, tmp_path):
        """Faults of a small package: ``room(page, "walls.py", old, new)``."""

        def faults(page, *change):
            folder = tmp_path / "room"
            folder.mkdir()
            for name, text in self.PACKAGE.items():
                if change and change[0] == name:
                    assert change[1] in text
                    text = text.replace(*change[1:])
                (folder / name).write_text(text)
            return public_names.missing(public_names.Source(folder), {"api.md": page})

        return faults

    def test_every_public_name_is_documented_and_on_a_page(self):
        assert public_names.missing(SOURCE, REFERENCE) == []

    def test_public_is_what_the_packages_export(self):
        for name in ("gluonpar", "gluonpar.collectives", "gluonpar.cluster"):
            exported = {f"{name}.{n}" for n in importlib.import_module(name).__all__}
            assert exported and exported <= set(SOURCE.public())

    def test_a_name_with_a_docstring_and_a_place_is_no_fault(self, room):
        assert room("::: room.paint\n") == []

    def test_a_page_may_name_the_module(self, room):
        assert room("::: room.walls\n") == []

    @pytest.mark.parametrize(
        ("page", "change", "fault"),
        [
            ("", (), "room.paint is public and on no page of the reference"),
            (
                "::: room.paint\n",
                ("walls.py", '"""Paint them."""', "pass"),
                "room.paint has no docstring",
            ),
            ("::: room.paint\n::: room.floor\n", (), "api.md: there is no room.floor"),
            ("::: room.paint\n::: room.walls.paint\n", (), "api.md: room.walls.paint is on api.md"),
            (
                "::: room.paint\n",
                ("__init__.py", '["paint"]', '["paint", "door"]'),
                "room.door is in __all__, and there is no such thing",
            ),
            (
                "::: room.paint\n",
                ("walls.py", "`paint`", "`point`"),
                "room.walls: its docstring refers to point, and there is no such thing",
            ),
            (
                "::: room.walls\n",
                ("walls.py", "def paint", "def point():\n    pass\n\n\ndef paint"),
                "room.walls.point has no docstring",
            ),
        ],
    )
    def test_a_fault_is_named(self, room, page, change, fault):
        (found,) = room(page, *change)
        assert found.startswith(fault)

    def test_a_method_without_docstring_is_a_fault(self, tmp_path):
        folder = tmp_path / "room"
        folder.mkdir()
        wall = 'class Wall:\n    """A wall."""\n\n    def fall(self):\n        pass\n'
        (folder / "__init__.py").write_text(f'__all__ = ["Wall"]\n\n\n{wall}')
        source = public_names.Source(folder)
        found = public_names.missing(source, {"api.md": "::: room.Wall\n"})
        assert found == ["room.Wall.fall has no docstring"]
