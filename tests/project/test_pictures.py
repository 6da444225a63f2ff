"""The committed pictures are what tools/draw_pictures.py draws, and every picture is described."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gluonpar.collectives import ALGORITHMS

pytest.importorskip("matplotlib")

import draw_pictures
from pictures import timelines

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


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
    of_plans = [name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None]
    drawn = {ROOT / "docs" / "pictures" / f"{name}.svg" for name in of_plans}
    assert {*PICTURES} | drawn <= set(shown)
    assert all(len(text) > 8 for texts in shown.values() for text in texts)
