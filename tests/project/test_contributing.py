"""CONTRIBUTING.md: its recipes for an algorithm and a workload are complete.

test_docs.py runs its code.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import doc_blocks
import numpy as np
import processes
import pytest

import gluonpar
from gluonpar.training import configuration, workloads

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


def test_a_workload_takes_its_class_and_its_entry(monkeypatch, capsys):
    """It trains on two devices as on one."""
    monkeypatch.setattr(workloads, "WORKLOADS", dict(workloads.WORKLOADS))
    monkeypatch.setattr(configuration, "WORKLOADS", workloads.WORKLOADS)
    (code,) = [block.text for block in BLOCKS if "class PerceptronWorkload" in block.text]
    exec(code, {"__name__": "recipe"})
    options = {"device": "cpu", "dataset": "synthetic", "limit": 48, "batch_size": 16}
    one, two = (
        gluonpar.train(num_gpus=k, num_epochs=2, model="perceptron", **options).epochs
        for k in (1, 2)
    )
    np.testing.assert_allclose([e.loss for e in one], [e.loss for e in two], rtol=1e-4)
    assert one[1].loss < one[0].loss
