"""docs/algorithms.md: its numbers are the plans', its pictures are there, and its examples run."""

from __future__ import annotations

import importlib.util
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from gluonpar.collectives import ALGORITHMS, plan, trace

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TEXT = (DOCS / "algorithms.md").read_text("utf-8")
CARDS = {
    part.partition("\n")[0]: part
    for part in re.split(r"^## ", TEXT, flags=re.M)
    if part.partition("\n")[0] in ALGORITHMS
}
PLANS = [name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None]


def rows(text):
    """The tables' rows: by the first cell, the others."""
    cells = ([c.strip() for c in line.strip("| ").split(" | ")] for line in text.splitlines())
    return {row[0]: row[1:] for row in cells if len(row) > 1}


def formula(name, label, k):
    names = {"K": k, "P": 1 << (k.bit_length() - 1), "ceil": math.ceil, "log2": math.log2}
    return eval(rows(CARDS[name])[label][0].strip("`"), {"__builtins__": {}}, names)


def counted(name, k):
    """Steps, sent, row and memory of the plan, the last three in arrays."""
    hops = ALGORITHMS[name].plan(k)
    chunks, steps = plan.num_chunks(hops), plan.num_steps(hops)
    wires = [Counter((h.src, h.dst) for h in hops if h.step == s) for s in range(steps)]
    kept = Counter(h.dst for h in hops if h.reduce or chunks > 1)  # see execute.run
    most = (max(c.values(), default=0) for c in (plan.chunks_sent(hops), kept))
    sent, memory = (number / chunks for number in most)
    return steps, sent, sum(max(wire.values()) for wire in wires) / chunks, memory


LABELS = (
    "steps",
    "sent per device, in arrays (most)",
    "row, in arrays",
    "memory beyond the arrays, in arrays (most)",
)


def test_every_algorithm_has_a_card_in_the_registry_s_order():
    assert list(CARDS) == list(ALGORITHMS)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("k", range(1, 10))
def test_the_formulas_are_the_plan_s_counts(name, k):
    assert [formula(name, label, k) for label in LABELS] == pytest.approx(counted(name, k))


def test_the_comparison_is_the_plans_counts_for_eight_devices():
    section = TEXT.partition("For K = 8, in arrays:")[2].partition("**Sent**")[0]
    table = rows(section)
    for name in PLANS:
        assert [float(cell) for cell in table[name]] == pytest.approx(counted(name, 8))
    assert set(PLANS) == set(table) - {"algorithm", "---|---|---|---|---"}


@pytest.mark.parametrize("name", PLANS)
def test_the_order_of_additions_is_the_plan_s(name):
    hops = ALGORITHMS[name].plan(4)
    values = [[str(i)] * plan.num_chunks(hops) for i in range(4)]
    for hop in hops:
        came, own = values[hop.src][hop.chunk], values[hop.dst][hop.chunk]
        values[hop.dst][hop.chunk] = f"({own}+{came})" if hop.reduce else came
    assert all(device == values[0] for device in values)  # so the bits are the same everywhere
    assert f"({rows(CARDS[name])['order of additions'][0]})".replace("`", "") == values[0][0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_card_is_complete(name):
    labels = set(rows(CARDS[name]))
    wanted = ("steps", "sent", "memory", "order of additions", "wins", "loses", "source")
    assert all(any(label.startswith(want) for label in labels) for want in wanted)
    pictures = re.findall(r"!\[(.+)\]\((.+)\)", CARDS[name])
    assert bool(pictures) == (name in PLANS)
    assert all((DOCS / path).is_file() for _, path in pictures)


def test_every_picture_is_shown():
    shown = set(re.findall(r"\]\(pictures/(.+\.svg)\)", TEXT))
    assert shown == {path.name for path in (DOCS / "pictures").glob("*")}


def test_the_table_of_hops_is_what_is_printed():
    assert f"```\n{trace('ring', 3)}\n```" in TEXT


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", TEXT, re.S))
def test_the_examples_run_and_their_own_assertions_hold(code, tmp_path, monkeypatch):
    if ".draw(" in code:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    before = dict(ALGORITHMS)
    try:
        exec(compile(code, "docs/algorithms.md", "exec"), {})
    finally:
        for name in set(ALGORITHMS) - set(before):
            del ALGORITHMS[name]


class TestScript:
    @pytest.fixture
    def script(self):
        pytest.importorskip("matplotlib")
        path = ROOT / "scripts" / "draw_algorithms.py"
        spec = importlib.util.spec_from_file_location("draw_algorithms", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def test_the_pictures_come_from_the_plans(self, script, capfd):
        assert script.main(["--check"]) == 0
        assert capfd.readouterr().err == ""

    def test_what_differs_is_named(self, script, tmp_path, capfd):
        folder = tmp_path / "new"
        assert script.main(["--folder", str(folder)]) == 0
        assert script.main(["--folder", str(folder), "--check"]) == 0
        ring = folder / "ring.svg"
        ring.write_text(ring.read_text("utf-8").replace("hop-0-0-1-0-add", "hop-0-0-2-0-add"))
        (folder / "tree.svg").unlink()
        (folder / "sun.svg").write_text("<svg/>")
        assert script.main(["--folder", str(folder), "--check"]) == 1
        said = capfd.readouterr().err
        assert re.findall(r"(\S+)\.svg is not what its plan gives", said) == [
            str(folder / name) for name in ("ring", "sun", "tree")
        ]
        assert "to draw them again: python scripts/draw_algorithms.py" in said
