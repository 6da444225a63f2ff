"""trace: the printed table is the plan, and the picture shows each hop once."""

from __future__ import annotations

import re
import sys

import pytest

from gluonpar.collectives import ALGORITHMS, trace
from gluonpar.plans import plan

PLANS = [name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None]
HOP = re.compile(r"(\d+) -> (\d+): chunks? ([\d, ]+) \((add|copy)\)")
GID = re.compile(r'id="hop-(\d+)-(\d+)-(\d+)-(\d+)-(add|copy)"')


def hop(step, src, dst, chunk, kind):
    return plan.Hop(int(step), int(src), int(dst), int(chunk), kind == "add")


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 8])
def test_the_table_is_the_plan(name, k):
    title, *rows, total = str(trace(name, k)).split("\n")
    hops = ALGORITHMS[name].plan(k)
    read = [
        hop(int(row.split()[1]) - 1, src, dst, chunk, kind)
        for row in rows
        for src, dst, chunks, kind in HOP.findall(row)
        for chunk in chunks.split(", ")
    ]
    assert sorted(read) == sorted(hops)
    assert len(rows) == plan.num_steps(hops)
    assert title == f"{name}, {k} device{'s' * (k > 1)}"
    steps, messages, *sent = re.findall(r"[\d/]+", total)
    assert (int(steps), int(messages)) == (len(rows), len(hops))
    counts, chunks = plan.chunks_sent(hops), plan.num_chunks(hops)
    assert [eval(fraction) for fraction in sent] == [counts[i] / chunks for i in range(k)]


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib .*pip install matplotlib"):
        trace("ring", 3).draw()


class TestPicture:
    @pytest.fixture(autouse=True)
    def _matplotlib(self):
        pytest.importorskip("matplotlib")

    @pytest.mark.parametrize("name, k", [(name, 4) for name in PLANS] + [("balanced", 8)])
    def test_it_shows_every_hop_once(self, name, k, tmp_path):
        path = tmp_path / "picture.svg"
        trace(name, k).draw(path)
        drawn = [hop(*numbers) for numbers in GID.findall(path.read_text())]
        assert sorted(drawn) == sorted(ALGORITHMS[name].plan(k))

    def test_drawn_again_it_has_the_same_bytes_and_no_date(self, tmp_path):
        first, second = tmp_path / "1.svg", tmp_path / "2.svg"
        trace("tree", 5).draw(first)
        trace("tree", 5).draw(second)
        assert first.read_bytes() == second.read_bytes()
        assert b"date" not in first.read_bytes()
        assert "<text" not in first.read_text()  # outlines, so that no font is needed

    def test_other_formats(self, tmp_path):
        trace("ring", 2).draw(str(tmp_path / "ring.png"))
        assert (tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")
        with pytest.raises(ValueError, match="cake"):
            trace("ring", 2).draw(tmp_path / "ring.cake")

    def test_matplotlib_is_left_as_it_was(self, tmp_path):
        import matplotlib

        names = set(matplotlib.rcParams) - {"backend"}  # reading that one chooses one
        before = {name: matplotlib.rcParams[name] for name in names}
        trace("ring", 2).draw(tmp_path / "ring.svg")
        assert before == {name: matplotlib.rcParams[name] for name in names}
        pyplot = sys.modules.get("matplotlib.pyplot")
        assert pyplot is None or not pyplot.get_fignums()
