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
@pytest.mark.parametrize("k", [1, 4, 6])
def test_the_table_is_the_plan(name, k):
    title, *rows, total = str(trace(name, k)).split("\n")
    hops = ALGORITHMS[name].plan(k)
    read = [
        hop(row.split()[1], src, dst, chunk, kind)
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


@pytest.mark.parametrize("name", ["host", "kvstore"])
def test_an_algorithm_without_a_plan_has_no_trace(name):
    with pytest.raises(ValueError, match=f"star, .*halving-doubling.* got '{name}'"):
        trace(name, 4)


def test_unknown_algorithms_and_zero_devices_are_refused():
    with pytest.raises(ValueError, match="star, .*'sun'"):
        trace("sun", 4)
    with pytest.raises(ValueError, match="num_devices must be at least 1, got 0"):
        trace("ring", 0)


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
        drawn = [hop(*found) for found in GID.findall(path.read_text())]
        assert sorted(drawn) == sorted(ALGORITHMS[name].plan(k))

    def test_other_formats(self, tmp_path):
        trace("ring", 2).draw(str(tmp_path / "ring.png"))
        assert (tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")
        with pytest.raises(ValueError, match="cake"):
            trace("ring", 2).draw(tmp_path / "ring.cake")
