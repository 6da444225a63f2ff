"""The walkthrough runs from top to bottom, its outputs are right, and it is what is committed."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nbformat", reason="needs: pip install nbformat nbclient")
pytest.importorskip("nbclient", reason="needs: pip install nbformat nbclient")
pytest.importorskip("d2l", reason="needs: pip install --no-deps d2l==1.0.3")

import build_notebooks as build
import nbformat
import processes

import gluonpar

LANGUAGES = build.languages()
NO_DATA = "Fashion-MNIST was not found here"


def codes(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?|-?\d+", text)]


def kinds(cell):
    """The types of a cell's outputs, and their formats."""
    return [(output.output_type, *sorted(output.get("data", {}))) for output in cell.outputs]


@pytest.fixture(scope="module", params=LANGUAGES)
def committed(request):
    """A committed notebook and its language."""
    return nbformat.read(build.FILES[request.param], as_version=4), request.param


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The cells, by name, of the English notebook and its solutions after a run on the CPU.

    It runs in another process, because the kernel's client does not close its sockets.
    """
    import matplotlib.font_manager  # noqa: F401 - fills the font cache, else the kernel warns

    path = tmp_path_factory.mktemp("notebook") / "ran.ipynb"
    done = processes.end(build.__file__, "--run", path, seconds=1800)
    assert done.returncode == 0, done.stderr
    return {cell.id: cell for cell in nbformat.read(path, as_version=4).cells}


@pytest.mark.slow
def test_the_folder_needs_no_other_file_of_a_clone(tmp_path):
    shutil.copytree(build.NOTEBOOKS, tmp_path / "copy")
    names = ", ".join(path.stem for path in build.NOTEBOOKS.glob("*.py"))
    package = str(Path(gluonpar.__file__).parents[1])
    done = processes.end(
        "-c", f"import gluonpar, {names}", cwd=tmp_path / "copy", PYTHONPATH=package
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_all_reduce_by_hand_and_the_library_s_are_the_sum(ran):
    sums = "{'cpu(0)': 111, 'cpu(1)': 111, 'cpu(2)': 111}\n"
    assert printed(ran["by-hand"]).endswith(sums)
    assert printed(ran["star"]).startswith(sums)
    wrong = printed(ran["wrong-order"]).splitlines()
    assert [ast.literal_eval(line) for line in wrong] == [
        {"cpu(0)": 111, "cpu(1)": 11, "cpu(2)": 111},
        {"cpu(0)": 11, "cpu(1)": 21, "cpu(2)": 100},
    ]
    ring = [numbers(row.partition(" ")[2]) for row in printed(ran["ring-run"]).splitlines()]
    assert ring == [np.arange(40).reshape(4, 10).sum(axis=0).tolist()] * 4


@pytest.mark.slow
def test_one_two_and_four_devices_train_alike_and_learn(ran):
    rows = [numbers(row) for row in printed(ran["table"]).splitlines()[1:]]
    assert [row[0] for row in rows] == [1, 2, 4]
    losses, accuracies = [row[2] for row in rows], [row[3] for row in rows]
    assert losses == pytest.approx([losses[0]] * 3, rel=0.02)
    assert accuracies == pytest.approx([accuracies[0]] * 3, abs=0.05)
    assert losses[0] < 0.6 * np.log(10)


@pytest.mark.slow
def test_the_exercise_starts_with_a_plan_that_is_not_the_ring_and_its_solution_is(ran):
    no, yes = "This is not the ring yet.", "This is the ring."
    for name, verdict in (("check-plan", no), ("exercise-ring", no), ("run-ring", yes)):
        *rows, last = printed(ran[name]).splitlines()
        assert last == verdict and len(rows) == 4 and all("sums right" in row for row in rows)
    assert [numbers(row) for row in printed(ran["run-ring"]).splitlines()[:4]] == [
        [k, k, 2 * (k - 1)] for k in (2, 3, 4, 7)
    ]


@pytest.mark.slow
def test_two_processes_train_as_one(ran):
    rows = [numbers(row) for row in printed(ran["processes"]).splitlines()]
    assert [row[:2] for row in rows] == [[1, 2], [2, 1]]  # processes, devices in each
    assert rows[0][-1] == pytest.approx(rows[1][-1], rel=1e-3)


def test_the_committed_notebook_is_built_from_the_source(committed):
    notebook, language = committed
    built = build.assemble(language, build.printed_in(notebook, language))
    assert [(c.id, c.source) for c in notebook.cells] == [(c.id, c.source) for c in built.cells]
    assert [cell.id for cell in codes(notebook)] == list(build.code(build.SOURCE / "cells.py"))
    english = nbformat.read(build.FILES["en"], as_version=4)
    assert [cell.outputs for cell in codes(notebook)] == [cell.outputs for cell in codes(english)]


@pytest.mark.slow
def test_every_output_is_committed(committed, ran):
    """Nor is there another one, such as an error, or warnings on stderr."""
    notebook, language = committed
    real = printed(ran["data"]).startswith("fashion-mnist (4096, 1, 28, 28)")
    assert real != (NO_DATA in printed(ran["data"])), "synthetic data must be announced"
    for cell in codes(notebook):
        assert kinds(cell) == kinds(ran[cell.id]), cell.id
    assert len([cell.id for cell in codes(notebook) if "image/png" in str(kinds(cell))]) == 11
    assert all(build.printed_in(notebook, language).values()), "a solution prints nothing"


def test_the_committed_outputs_are_of_real_data_without_errors_or_paths(committed):
    notebook, language = committed
    outputs = [output for cell in codes(notebook) for output in cell.outputs]
    texts = [o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs]
    shown = "\n".join(texts)
    assert NO_DATA not in shown and "fashion-mnist (4096, 1, 28, 28)" in shown
    assert not re.findall(r"Traceback|Error|W(?:arning|ARNING)|/(?:root|home|work|tmp)\b", shown)
    assert "stderr" not in [output.get("name") for output in outputs]
    counts = [cell.execution_count for cell in codes(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    assert notebook.metadata == build.METADATA
    assert not [cell.id for cell in notebook.cells if cell.metadata]
    assert build.FILES[language].stat().st_size < 1_500_000
    nbformat.validate(notebook)
