"""Pictures show what they should: a plan's hops; the committed ones are drawn and described."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gluonpar.collectives import ALGORITHMS

pytest.importorskip("matplotlib")

import draw_pictures
import drawing
from pictures import timelines

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PLANS = [name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None]
HOP = re.compile(r'id="hop-(\d+)-(\d+)-(\d+)-(\d+)-(add|copy)"')


def words(path):
    """A picture's title, description and words, which matplotlib keeps in comments."""
    text = path.read_text("utf-8")
    return sorted(re.findall(r"<!-- (.*?) -->|<(?:title|desc|text) [^>]*>([^<]*)", text, re.S))


def test_the_committed_pictures_and_timelines_are_what_is_drawn(tmp_path):
    """Their words are compared: outlines differ between versions of matplotlib."""
    draw_pictures.draw(tmp_path)
    assert {path.name for path in PICTURES} == {path.name for path in tmp_path.iterdir()}
    for path in PICTURES:
        assert words(path) == words(tmp_path / path.name), f"{path.name}: make pictures"
    assert draw_pictures.TIMELINES.read_text("utf-8") == timelines.text(), "make pictures"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_a_title_and_a_description_and_needs_no_font(path):
    """But for Chinese, which a browser writes in its own font."""
    text = path.read_text("utf-8")
    title, description = ElementTree.fromstring(text)[:2]
    assert title.tag.endswith("title") and len(title.text) > 5
    assert description.tag.endswith("desc") and len(description.text) > 50
    assert ("<text" in text) == path.stem.endswith(".zh-CN")


def test_every_picture_is_shown_on_a_page_and_has_alternative_text():
    """Some are committed, the site draws others (docs/hooks/drawings.py)."""
    shown = {}
    for page in (*PAGES, *(ROOT / "notebooks").glob("*.ipynb")):
        for text, link in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text("utf-8")):
            shown.setdefault((page.parent / link).resolve(), []).append(text)
        for name, text in re.findall(r"<!-- picture: (\S+): (.*?) -->", page.read_text("utf-8")):
            shown.setdefault(ROOT / "docs" / "pictures" / name, []).append(text)
    drawn = {ROOT / "docs" / "pictures" / f"{name}.svg" for name in PLANS}
    assert {*PICTURES} | drawn <= set(shown)
    assert all(len(text) > 8 for texts in shown.values() for text in texts)


@pytest.mark.parametrize("name, k", [(name, 4) for name in PLANS] + [("balanced", 8)])
def test_a_plans_picture_shows_every_hop_once_and_is_the_same_each_time(name, k, tmp_path):
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    drawing.draw(name, k, first)
    drawn = [(*map(int, hop[:4]), hop[4] == "add") for hop in HOP.findall(first.read_text())]
    assert sorted(drawn) == sorted(ALGORITHMS[name].plan(k))
    drawing.draw(name, k, second)
    assert first.read_bytes() == second.read_bytes()
    assert b"date" not in first.read_bytes()


def test_the_plot_of_a_benchmark_is_drawn_from_its_file(tmp_path):
    measured, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    options = ["--device", "cpu", "--max-bytes", "8K", "--factor", "2", "--iters", "1"]
    bench = [sys.executable, "-m", "gluonpar", "bench", *options, "--json", measured]
    subprocess.run(bench, check=True, capture_output=True)
    subprocess.run(
        [sys.executable, ROOT / "tools" / "plot_bench.py", measured, picture], check=True
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
