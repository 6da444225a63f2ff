"""The walkthrough: its cells run, their results are correct, and the committed notebooks match."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

nbformat = pytest.importorskip("nbformat", reason="needs: pip install 'gluonpar[notebook]'")
pytest.importorskip("nbclient", reason="needs: pip install 'gluonpar[notebook]'")
pytest.importorskip("d2l", reason="needs: pip install --no-deps d2l==1.0.3")

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("build", ROOT / "tools" / "build_notebooks.py")
build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build)

LANGUAGES = build.languages()
NO_DATA = "Fashion-MNIST was not found here"
MOST_BYTES = 1_500_000


def codes(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def everything_shown(notebook):
    """All text in a notebook's outputs."""
    outputs = [output for cell in codes(notebook) for output in cell.outputs]
    texts = [output.get("text", "") for output in outputs]
    texts += [output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join(texts)


@pytest.fixture(scope="module", params=LANGUAGES)
def committed(request):
    """A committed notebook and its language."""
    return nbformat.read(build.FILES[request.param], as_version=4), request.param


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The cells by name of the English notebook with its solutions, after a run on the CPU.

    It runs in a separate process, because the kernel's client leaves sockets open, and warnings are
    errors here.
    """
    import matplotlib.font_manager  # noqa: F401 - builds the font cache before the run

    path = tmp_path_factory.mktemp("notebook") / "ran.ipynb"
    command = [sys.executable, build.__file__, "--run", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return {cell.id: cell for cell in nbformat.read(path, as_version=4).cells}


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?|-?\d+", text)]


def test_all_cells_run_without_errors_or_warnings(ran):
    wrong = [
        (name, output.output_type, output.get("name"))
        for name, cell in ran.items()
        for output in cell.get("outputs", ())
        if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert wrong == []


def test_synthetic_data_are_announced(ran):
    real = printed(ran["data"]).startswith("fashion-mnist (4096, 1, 28, 28)")
    assert real != (NO_DATA in printed(ran["data"]))


def test_the_hand_written_all_reduce_and_the_library_give_the_sum(ran):
    all_sums = "{'cpu(0)': 111, 'cpu(1)': 111, 'cpu(2)': 111}\n"
    assert printed(ran["by-hand"]).endswith(all_sums)
    assert printed(ran["star"]).startswith(all_sums)
    wrong = printed(ran["wrong-order"]).splitlines()
    assert [ast.literal_eval(line) for line in wrong] == [
        {"cpu(0)": 111, "cpu(1)": 11, "cpu(2)": 111},
        {"cpu(0)": 11, "cpu(1)": 21, "cpu(2)": 100},
    ]


def test_the_ring_ends_with_the_sum_on_all_devices(ran):
    sums = np.arange(40).reshape(4, 10).sum(axis=0).tolist()
    rows = printed(ran["ring-run"]).splitlines()
    assert [numbers(row.partition(" ")[2]) for row in rows] == [sums] * 4


def test_one_two_and_four_devices_reach_the_same_loss(ran):
    rows = [numbers(row) for row in printed(ran["table"]).splitlines()[1:]]
    assert [row[0] for row in rows] == [1, 2, 4]
    losses, accuracies = [row[1] for row in rows], [row[2] for row in rows]
    assert losses == pytest.approx([losses[0]] * 3, rel=0.02)
    assert accuracies == pytest.approx([accuracies[0]] * 3, abs=0.05)
    assert losses[0] < 0.6 * np.log(10), "the network has not learnt"


def test_measured_algorithms_are_correct_and_busbw_follows_from_algbw(ran):
    rows = [line.split() for line in printed(ran["measure"]).splitlines()[1:]]
    assert [row[1] for row in rows] == ["star", "tree", "ring", "host"] * 3
    for num_bytes, _, ms, algbw, busbw, wrong in rows:
        assert wrong == "0"
        assert float(busbw) == pytest.approx(float(algbw) * 2 * 3 / 4, abs=2e-3)  # 3 decimals
        assert float(algbw) == pytest.approx(int(num_bytes) / float(ms) / 1e6, rel=0.1, abs=2e-3)


def test_several_processes_train_as_one(ran):
    one, two = printed(ran["processes"]).splitlines()
    assert one.startswith("processes: 1, devices in each: 2, loss ")
    assert two.startswith("processes: 2, devices in each: 1, loss ")
    assert numbers(one)[-1] == pytest.approx(numbers(two)[-1], rel=1e-3)


def test_every_exercise_has_a_cell_and_a_solution_that_runs(ran):
    exercises = [name[len("exercise-") :] for name in ran if name.startswith("exercise-")]
    assert exercises == list(build.code(build.SOURCE / "solutions.py"))
    for name in exercises:
        assert printed(ran[f"exercise-{name}"]), name
        assert printed(ran[f"run-{name}"]), name
    balanced = printed(ran["run-owners"]).splitlines()[-1]
    assert balanced.endswith("each device sends, in arrays: 3/2, 3/2, 3/2, 3/2")


def test_the_committed_notebook_matches_its_source(committed):
    notebook, language = committed
    assembled = build.assemble(language, build.printed_in(notebook, language))
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in assembled.cells]
    assert [cell.id for cell in notebook.cells] == [cell.id for cell in assembled.cells]


def test_all_languages_have_the_same_code_and_outputs(committed):
    notebook, _ = committed
    english = nbformat.read(build.FILES["en"], as_version=4)
    assert [(c.id, c.source, c.outputs) for c in codes(notebook)] == [
        (c.id, c.source, c.outputs) for c in codes(english)
    ]


def test_all_cells_of_the_source_are_used_once_and_in_order(committed):
    notebook, _ = committed
    assert [cell.id for cell in codes(notebook)] == list(build.code(build.SOURCE / "cells.py"))


def kinds(cell):
    """The type of each output of a cell, with its MIME types."""
    return [(output.output_type, *sorted(output.get("data", {}))) for output in cell.outputs]


def test_the_committed_outputs_have_the_kinds_of_a_run(committed, ran):
    notebook, language = committed
    for cell in codes(notebook):
        assert kinds(cell) == kinds(ran[cell.id]), cell.id
    pictures = [cell.id for cell in codes(notebook) if "image/png" in str(kinds(cell))]
    assert len(pictures) == 12
    assert all(build.printed_in(notebook, language).values()), "a solution prints nothing"


def test_the_committed_outputs_use_real_data_and_have_no_errors_or_paths(committed):
    notebook, _ = committed
    shown = everything_shown(notebook)
    assert NO_DATA not in shown and "fashion-mnist (4096, 1, 28, 28)" in shown
    for word in (
        "Traceback",
        "Error",
        "Warning",
        "WARNING",
        "/root",
        "/home",
        "/work",
        "/tmp",
        "site-packages",
    ):
        assert word not in shown, word
    assert not [o for cell in codes(notebook) for o in cell.outputs if o.get("name") == "stderr"]
    assert [cell.execution_count for cell in codes(notebook)] == list(
        range(1, len(codes(notebook)) + 1)
    )


def test_the_committed_notebook_is_small_and_has_no_machine_specific_metadata(committed):
    notebook, language = committed
    assert build.FILES[language].stat().st_size < MOST_BYTES
    assert notebook.metadata == build.METADATA
    assert not [cell.id for cell in notebook.cells if cell.metadata]
    nbformat.validate(notebook)


def test_solutions_are_collapsed(committed):
    notebook, _ = committed
    solutions = [cell for cell in notebook.cells if cell.id.startswith("solution-")]
    assert len(solutions) == len(build.code(build.SOURCE / "solutions.py")) == 7
    for cell in solutions:
        assert cell.source.startswith("<details>\n<summary>"), cell.id
        assert cell.source.endswith("\n\n</details>"), cell.id
        assert cell.source.count("<details>") == cell.source.count("</details>") == 1


def test_links_in_the_notebook_have_targets(committed):
    notebook, _ = committed
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    titles = {
        re.sub(r"`", "", title).strip().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.M)
    }
    for target in re.findall(r"\]\(([^)]*)\)", text):
        if target.startswith("#"):
            assert target[1:] in titles, target
        elif not target.startswith("https://"):
            assert (build.NOTEBOOKS / target).exists(), target


def test_the_committed_picture_matches_its_script():
    path = build.SOURCE / "draw_three_ways.py"
    spec = importlib.util.spec_from_file_location("draw_three_ways", path)
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    for name, words in drawing.WORDS.items():
        assert (drawing.PICTURES / name).read_text("utf-8") == drawing.picture(words)


def test_two_cells_with_the_same_name_raise_value_error(tmp_path):
    path = tmp_path / "cells.py"
    path.write_text("# %% a\n1\n# %% b\n2\n# %% a\n3\n")
    with pytest.raises(ValueError, match="a, b, a"):
        build.code(path)


def test_a_solution_without_end_raises_value_error():
    with pytest.raises(ValueError, match="x .*<!-- end -->"):
        list(build.pieces("words\n<!-- solution: x -->\nmore words"))
