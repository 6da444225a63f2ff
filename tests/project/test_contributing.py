"""CONTRIBUTING.md: its recipe for an algorithm is complete; test_docs.py runs the others."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import doc_blocks
import processes
import pytest

import gluonpar

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(gluonpar.__file__).parent  # in the checkout, or where the wheel is installed
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
BLOCKS = doc_blocks.blocks(TEXT)
LINE = "gluonpar/plans/algorithms/line.py"  # the file that the recipe tells to write


@pytest.mark.slow
def test_an_algorithm_takes_its_file_and_one_line(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "gluonpar")
    shutil.copytree(ROOT / "tests" / "collectives", tmp_path / "tests" / "collectives")
    shutil.copytree(ROOT / "tests" / "support", tmp_path / "tests" / "support")
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (code,) = [block.text for block in BLOCKS if block.text.startswith('"""line:')]
    (tmp_path / LINE).write_text(code)
    with (tmp_path / LINE).with_name("__init__.py").open("a") as file:
        file.write("from gluonpar.plans.algorithms import line\n")
    options = ["-p", "no:cacheprovider", "-k", "line"]
    tests = ["tests/collectives/test_plans.py", LINE]
    done = processes.end("-m", "pytest", *options, *tests, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert f"\n{LINE} ." in done.stdout  # its example
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20
