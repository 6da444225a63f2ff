"""Pictures show what they should: a plan's hops; the committed ones are what is drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gluonpar.collectives import ALGORITHMS

pytest.importorskip("matplotlib")

import draw_pictures
import drawing
from pictures import timelines

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
PLANS = [name for name, plan in ALGORITHMS.items() if plan]
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


@pytest.mark.parametrize("name, k", [(name, 4) for name in PLANS] + [("balanced", 8)])
def test_a_plans_picture_shows_every_hop_once(name, k, tmp_path):
    path = tmp_path / "plan.svg"
    drawing.draw(name, k, path)
    drawn = [(*map(int, hop[:4]), hop[4] == "add") for hop in HOP.findall(path.read_text())]
    assert sorted(drawn) == sorted(ALGORITHMS[name](k))


def test_a_picture_is_the_same_each_time_and_has_no_date(tmp_path):
    paths = tmp_path / "1.svg", tmp_path / "2.svg"
    for path in paths:
        drawing.draw("star", 3, path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second and b"date" not in first
