"""trace: the table says what the plan says, and the picture shows each hop once."""

from __future__ import annotations

import re
import sys

import pytest

from gluonpar.collectives import ALGORITHMS, plan, trace

PLANS = [name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None]
RING = """\
ring, 3 devices
step 0  0 -> 1: chunk 0 (add)    1 -> 2: chunk 1 (add)    2 -> 0: chunk 2 (add)
step 1  0 -> 1: chunk 2 (add)    1 -> 2: chunk 0 (add)    2 -> 0: chunk 1 (add)
step 2  0 -> 1: chunk 1 (copy)   1 -> 2: chunk 2 (copy)   2 -> 0: chunk 0 (copy)
step 3  0 -> 1: chunk 0 (copy)   1 -> 2: chunk 1 (copy)   2 -> 0: chunk 2 (copy)
4 steps, 12 messages; each device sends, in arrays: 4/3, 4/3, 4/3"""
HOP = re.compile(r"(\d+) -> (\d+): chunks? ([\d, ]+) \((add|copy)\)")
GID = re.compile(r'id="hop-(\d+)-(\d+)-(\d+)-(\d+)-(add|copy)"')


def hop(step, src, dst, chunk, kind):
    return plan.Hop(int(step), int(src), int(dst), int(chunk), kind == "add")


def test_the_ring_of_three():
    assert str(trace("ring", 3)) == RING


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 8])
def test_the_table_is_the_plan(name, k):
    title, *rows, total = str(trace(name, k)).split("\n")
    hops = ALGORITHMS[name].plan(k)
    read = [
        hop(row.split()[1], src, dst, chunk, kind)
        for row in rows
        for src, dst, chunks, kind in HOP.findall(row)
        for chunk in chunks.split(", ")
    ]
    assert title == f"{name}, {k} device{'s' * (k > 1)}"
    assert sorted(read) == sorted(hops)
    assert len(rows) == plan.num_steps(hops)
    assert total.startswith(f"{len(rows)} steps, {len(hops)} messages; ")
    sent = [eval(fraction) for fraction in total.partition("arrays: ")[2].split(", ")]
    counts = plan.chunks_sent(hops)
    assert sent == [counts[i] / plan.num_chunks(hops) for i in range(k)]


def test_chunks_between_the_same_devices_stand_together():
    assert "0 -> 2: chunks 2, 3 (add)" in str(trace("halving-doubling", 4))


def test_jupyter_shows_a_row_a_step_and_a_column_a_device():
    table = trace("ring", 3)._repr_html_()
    assert table.count("<tr>") == 1 + 4
    assert table.count("<td>") == 4 * 3
    assert "<tr><th>1</th><td>to 1: chunk 2 (add)</td><td>to 2: chunk 0 (add)</td>" in table
    assert "each device sends, in arrays: 4/3, 4/3, 4/3" in table


@pytest.mark.parametrize("name", ["host", "kvstore"])
def test_what_has_no_plan_has_no_trace(name):
    words = f"algorithm '{name}' has no hops to trace; these have: star, .*halving-doubling"
    with pytest.raises(ValueError, match=words):
        trace(name, 4)


def test_unknown_algorithms_and_no_devices_are_refused():
    with pytest.raises(ValueError, match="no all-reduce algorithm 'sun'; there are: star"):
        trace("sun", 4)
    with pytest.raises(ValueError, match="num_devices=0; a plan is for 1 device or more"):
        trace("ring", 0)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib .*pip install 'gluonpar\[plot\]'"):
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

    def test_arrows_end_on_the_lanes_of_their_devices(self):
        traced = trace("bidirectional-ring", 3)
        axes = traced.draw().axes[0]
        lanes = [patch for patch in axes.patches if patch.get_gid() is None]
        arrows = [patch for patch in axes.patches if patch.get_gid() is not None]
        assert (len(lanes), len(arrows)) == (3, len(traced.hops))
        for arrow in arrows:
            step, src, dst, _, kind = arrow.get_gid().split("-")[1:]
            (left, tail), *_, (right, head) = arrow.get_path().vertices
            assert left < right
            for y, device in ((tail, src), (head, dst)):
                lane = lanes[int(device)]
                assert lane.get_y() < y < lane.get_y() + lane.get_height()
            assert (arrow.get_linestyle() in ("-", "solid")) == (kind == "add")

    @pytest.mark.parametrize("name", PLANS)
    @pytest.mark.parametrize("k", range(2, 9))
    def test_no_two_circles_overlap_and_all_is_inside(self, name, k):
        axes = trace(name, k).draw().axes[0]
        circles = sorted(t.get_position() for t in axes.texts if t.get_color() == "white")
        assert len(circles) == len(ALGORITHMS[name].plan(k))
        for (x, y), (next_x, next_y) in zip(circles, circles[1:]):
            assert abs(next_x - x) > 0.2 or abs(next_y - y) > 0.2
        width, height = axes.get_xlim()[1], axes.get_ylim()[0]
        ends = [patch.get_path().vertices for patch in axes.patches if patch.get_gid()]
        assert all((0 < xy).all() and (xy < (width, height)).all() for xy in ends)

    def test_one_device_has_nothing_to_send(self):
        words = [text.get_text() for text in trace("ring", 1).draw().axes[0].texts]
        assert words == ["ring, 1 device", "device 0", "there is nothing to send"]

    def test_drawn_again_it_has_the_same_bytes_and_no_date(self, tmp_path):
        first, second = tmp_path / "1.svg", tmp_path / "2.svg"
        trace("tree", 5).draw(first)
        trace("tree", 5).draw(second)
        assert first.read_bytes() == second.read_bytes()
        assert b"date" not in first.read_bytes()
        assert "<!-- step 3 -->" in first.read_text()  # outlines, so that no font is needed
        assert "<text" not in first.read_text()

    def test_the_background_is_transparent_and_dark_lightens_the_words(self):
        light, dark = (trace("ring", 2).draw(dark=dark) for dark in (False, True))
        assert light.get_facecolor()[3] == dark.get_facecolor()[3] == 0
        words = [figure.axes[0].texts[0].get_color() for figure in (light, dark)]
        assert words[0] < words[1]

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
