"""CONTRIBUTING.md: its code runs, and its files, commands and rules are those of the project."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import doc_blocks
import pytest

from gluonpar.collectives import ALGORITHMS, plan

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
BLOCKS = doc_blocks.blocks(TEXT)
LINE = "gluonpar/collectives/line.py"  # the file that a reader is told to write
COMMANDS = [line for b in BLOCKS if b.language == "sh" for line in b.text.splitlines()]
COMMANDS += re.findall(r"`(make [^`]+)`", TEXT)


def test_its_code_prints_what_stands_below_it(tmp_path):
    done = subprocess.run(
        [sys.executable, doc_blocks.__file__, str(ROOT / "CONTRIBUTING.md")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    outcomes = {outcome["line"]: outcome for outcome in json.loads(done.stdout)}
    shown = {b.line: b.output or "" for b in BLOCKS if b.language == "python"}
    assert len(shown) == 2
    assert {line: outcome["printed"] for line, outcome in outcomes.items()} == shown
    assert all(outcome["error"] is None for outcome in outcomes.values())


@pytest.mark.parametrize("k", range(1, 8))
def test_its_algorithm_obeys_the_law_of_all_algorithms(k):
    (code,) = [b.text for b in BLOCKS if b.text.startswith('"""line:')]
    try:
        exec(compile(code, LINE, "exec"), {})
        hops = ALGORITHMS["line"].plan(k)
    finally:
        del ALGORITHMS["line"]
    assert all(v == Counter(range(k)) for row in plan.contributions(hops, k) for v in row)


def test_it_names_only_files_that_are_there():
    named = set(re.findall(r"`([\w./-]+/[\w.-]+|[\w-]+\.(?:md|py))`", TEXT)) - {LINE}
    folders = ("", "gluonpar", "benchmarks/training", "notebooks/walkthrough")
    missing = {n for n in named if not any((ROOT / folder / n).exists() for folder in folders)}
    inside = {n for n in missing if n.startswith("gluonpar/")}  # where the package is installed
    here = Path(sys.modules["gluonpar"].__file__).parent
    assert missing - inside - {p.name for p in here.rglob("*.py")} == set()
    assert all((here.parent / name).exists() for name in inside)
    assert len(named) > 15


def test_its_commands_are_targets_and_tests_that_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    asked = set()
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            asked |= {w for w in words[1:] if w not in ("-C", "gluonpar") and "=" not in w}
        elif words[0] == ".venv/bin/python":
            assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
    assert asked == {"test", "format", "lint", "pictures", "dist", "test-dist"}
    assert asked <= targets


def test_from_a_clone_to_green_tests_are_two_commands():
    first = next(block for block in BLOCKS if block.language == "sh")
    assert [line.split()[0] for line in first.text.splitlines()] == ["git", "make"]


def test_its_rules_on_private_interfaces_are_the_architecture_s():
    architecture = (ROOT / "tests" / "test_architecture.py").read_text("utf-8")
    allowed = re.findall(r"allowed = \{(.*)\}", architecture)[0].replace('"', "").split(", ")
    said = re.search(r"library handle is used in(.*?) only\.", TEXT, re.S)[1]
    assert sorted(re.findall(r"`(\w+)`", said)) == sorted(allowed)
