"""The walkthrough runs from top to bottom, its outputs are right, and it is what is committed."""

from __future__ import annotations

import ast
import itertools
import re
import shutil
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

pytest.importorskip("nbformat", reason="needs: pip install nbformat nbclient")
pytest.importorskip("nbclient", reason="needs: pip install nbformat nbclient")
pytest.importorskip("d2l", reason="needs: pip install --no-deps d2l==1.0.3")

import build_notebooks as build
import nbformat
import walkthrough_checks as checks
import walkthrough_tables as tables

import gluonpar
from gluonpar import collectives
from gluonpar.collectives import Hop
from tests.support import processes

LANGUAGES = build.languages()
NO_DATA = "Fashion-MNIST was not found here"
RIGHT, BETTER, WRONG = "Right.", "Right, but not good: ", "Wrong: "
STARTS = {"owners": BETTER, "accuracy": BETTER, "batch-norm": WRONG, "speed": BETTER, "wait": WRONG}
WORDS_AND_SIZES = r"(slower|faster|neither slower nor faster) with ([\d, and]+) bytes"


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
        [k, k, 2 * (k - 1), 1] for k in (2, 3, 4, 7)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "begins_with"), [*STARTS.items()])
def test_an_exercise_starts_with_something_to_improve_and_its_solution_is_right(
    name, begins_with, ran
):
    assert printed(ran[f"exercise-{name}"]).splitlines()[-1].startswith(begins_with)
    assert printed(ran[f"run-{name}"]).splitlines()[-1] == RIGHT


def test_the_sentence_on_the_ring_and_the_star_is_made_of_the_samples(capsys):
    star = [[10, 11, 12, 13, 99]] * 4
    ring = [[20, 21, 22, 23, 24], [9, 10, 12, 14, 15], [1, 2, 3, 4, 99], [14, 15, 16, 17, 18]]
    tables.bandwidths({"star": star, "ring": ring}, sizes=(1, 2, 3, 4), num_devices=4)
    *rows, last = capsys.readouterr().out.splitlines()
    words = [row.split(", ")[1] for row in rows[-4:]]
    assert words == ["slower", "within noise", "faster", "slower"]
    assert dict(re.findall(WORDS_AND_SIZES, last)) == {
        "slower": "1 and 4",
        "neither slower nor faster": "2",
        "faster": "3",
    }


@pytest.mark.slow
def test_the_sentence_on_the_ring_and_the_star_has_every_size_once(ran):
    *rows, last = printed(ran["measure"]).splitlines()
    said = {
        size: word
        for word, sizes in re.findall(WORDS_AND_SIZES, last)
        for size in re.findall(r"\d+", sizes)
    }
    assert len(said) == 3
    for row in rows[-3:]:
        word = said[row.split()[0]].replace("neither slower nor faster", "within noise")
        assert row.endswith(f", {word}")


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


def functions(name, file="solutions.py"):
    """The functions that a solution or a cell defines, without what it runs, by name."""
    tree = ast.parse(build.code(build.SOURCE / file)[name])
    tree.body = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ImportFrom))]
    space = {
        "gluonpar": gluonpar,
        "nd": mx.nd,
        "mx": mx,
        "autograd": mx.autograd,
        "gluon": mx.gluon,
    }
    space["Hop"] = Hop
    exec(compile(tree, name, "exec"), space)
    return space


def shown(capsys, check, answer):
    check(answer)
    return capsys.readouterr().out


def one_by_one(plan):
    """The same plan with one message per step."""
    return lambda k: [hop._replace(step=i) for i, hop in enumerate(sorted(plan(k)))]


class TestChecks:
    """A check accepts what is right, and tells it from what is right but not good, and wrong."""

    def test_only_the_ring_is_the_ring(self, capsys):
        ring, library = functions("ring")["my_ring"], collectives.ALGORITHMS
        plans = [ring, library["ring"]]
        others = [one_by_one(ring), *(library[name] for name in ("star", "balanced"))]
        others += [library["bidirectional-ring"], lambda k: ring(k)[:-1]]
        yes = [shown(capsys, checks.ring, plan).endswith("This is the ring.\n") for plan in plans]
        no = [shown(capsys, checks.ring, plan).endswith("not the ring yet.\n") for plan in others]
        assert all(yes) and all(no)

    def test_owners_send_equal_amounts_and_each_sums_its_chunk(self, capsys):
        good, plans = functions("owners")["owners"], collectives.ALGORITHMS

        def two_steps(k):
            """All messages to owners at the same time, and all from owners."""
            return [hop._replace(step=int(not hop.reduce)) for hop in good(k)]

        def two_chunks_for_device_0(k):
            """Chunk k, too, is summed by device 0."""
            more = [Hop(i - 1, i, 0, k, True) for i in range(1, k)]
            return [*good(k), *more, *(Hop(k + i, 0, i, k, False) for i in range(1, k))]

        for right in (good, plans["balanced"], two_steps):
            assert shown(capsys, checks.owners, right) == "Right.\n"
        several = (two_chunks_for_device_0, one_by_one(good))
        for plan in (*several, *(plans[name] for name in ("star", "ring", "tree"))):
            assert shown(capsys, checks.owners, plan).startswith(BETTER)
        for wrong in (lambda k: good(k)[1:], lambda k: good(k) + good(k), lambda k: []):
            assert shown(capsys, checks.owners, wrong).startswith(WRONG)

    def test_all_devices_count_and_the_host_waits_once(self, capsys):
        good = functions("accuracy")["count_correct"]
        starts = functions("exercise-accuracy", "cells.py")["count_correct"]

        def waits_for_every_shard(batches, device_params, ctx, model):
            count = 0
            for batch in batches:
                for params, (X, y) in zip(device_params, gluonpar.split_and_load(batch, ctx)):
                    count += (model(X, params).argmax(axis=1) == y).sum().asscalar()
            return count

        def one_device_only(batches, device_params, ctx, model):
            return good([(X[::2], y[::2]) for X, y in batches], device_params, ctx, model)

        def adds_the_sums(*arguments):
            return len(arguments[2]) * good(*arguments)

        assert shown(capsys, checks.accuracy, good) == "Right.\n"
        for answer in (starts, waits_for_every_shard):
            assert shown(capsys, checks.accuracy, answer).startswith(BETTER)
        for answer in (one_device_only, adds_the_sums):
            assert shown(capsys, checks.accuracy, answer).startswith(WRONG)

    def test_shards_are_normalized_as_one_batch_on_their_devices(self, capsys):
        def on_device_0(X, ctx):
            return functions("exercise-batch-norm", "cells.py")["normalize"](X, ctx[:1])

        answers = {
            RIGHT: functions("batch-norm")["normalize"],
            BETTER: on_device_0,
            WRONG: functions("exercise-batch-norm", "cells.py")["normalize"],
        }
        for verdict, answer in answers.items():
            assert shown(capsys, checks.batch_norm, answer).startswith(verdict)
        half = lambda X, ctx: on_device_0(X, ctx)[0][:3]  # noqa: E731
        assert shown(capsys, checks.batch_norm, lambda X, ctx: [half(X, ctx)]).startswith(WRONG)

    def test_shards_follow_the_speeds(self, capsys):
        def first_to_finish(X, speeds, ctx):
            """Give each sample to the device that would have finished it first."""
            samples = [[] for _ in speeds]
            for x in X:
                ends = [(len(some) + 1) / speed for some, speed in zip(samples, speeds)]
                samples[ends.index(min(ends))].append(x)
            return [mx.nd.array(some, ctx=c) for some, c in zip(samples, ctx)]

        answers = {
            RIGHT: [functions("speed")["split"], first_to_finish],
            BETTER: [
                functions("exercise-speed", "cells.py")["split"],
                lambda X, speeds, ctx: [mx.nd.array(X, ctx=ctx[speeds.index(max(speeds))])],
                lambda X, speeds, ctx: gluonpar.split_and_load(
                    X, ctx, weights=[s**2 for s in speeds]
                ),
            ],
            WRONG: [
                lambda X, speeds, ctx: gluonpar.split_and_load(X[:-1], ctx, weights=speeds),
                lambda X, speeds, ctx: [mx.nd.array(X, ctx=c) for c in ctx],
            ],
        }
        for verdict, some in answers.items():
            for answer in some:
                assert shown(capsys, checks.speeds, answer).startswith(verdict)

    def test_two_steps_are_in_progress_neither_more_nor_fewer(self, capsys):
        def waits_for_each(batches, step):
            for X, y in batches:
                step(X, y)[0].wait_to_read()

        def waits_for_pairs(batches, step):
            for i, (X, y) in enumerate(batches):
                step(X, y)
                if i % 2:
                    mx.nd.waitall()

        def reads_sums(batches, step):
            sums = []
            for X, y in batches:
                sums.append(step(X, y)[0].sum())
                if len(sums) > 1:
                    sums[-2].asscalar()

        def three(batches, step):
            losses = []
            for X, y in batches:
                losses.append(step(X, y)[0])
                if len(losses) > 2:
                    losses[-3].asnumpy()

        def leaves_one_out(batches, step):
            functions("wait")["run_steps"](itertools.islice(batches, 1, None), step)

        answers = {
            RIGHT: [functions("wait")["run_steps"], reads_sums],
            BETTER: [waits_for_each, waits_for_pairs],
            WRONG: [functions("exercise-wait", "cells.py")["run_steps"], three, leaves_one_out],
        }
        for verdict, some in answers.items():
            for answer in some:
                assert shown(capsys, checks.in_progress, answer).startswith(verdict), answer
