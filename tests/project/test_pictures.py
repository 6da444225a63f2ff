"""The committed pictures are what tools/draw_pictures.py draws, and every picture is described."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gluonpar.collectives import ALGORITHMS
from gluonpar.training.profiler import BACKWARD, FORWARD, FUSED, Profile, Span

pytest.importorskip("matplotlib")

import draw_pictures
from pictures import plans, scaling, timeline

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def words(path):
    """A picture's title, description and words, which matplotlib keeps in comments."""
    text = path.read_text("utf-8")
    return sorted(re.findall(r"<!-- (.*?) -->|<(?:title|desc|text) [^>]*>([^<]*)", text, re.S))


def test_the_committed_pictures_and_plans_are_what_is_drawn(tmp_path):
    """Their words are compared: outlines differ between versions of matplotlib."""
    draw_pictures.draw(tmp_path)
    assert {path.name for path in PICTURES} == {path.name for path in tmp_path.iterdir()}
    for path in PICTURES:
        assert words(path) == words(tmp_path / path.name), f"{path.name}: make pictures"
    assert draw_pictures.PLANS.read_text("utf-8") == plans.text(), "make pictures"


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


def test_a_timeline_holds_whole_steps_from_a_device_s_first_forward():
    spans = []
    for begin in range(0, 4000, 1000):
        spans += [
            Span("Convolution", 0, begin, begin + 200, FORWARD),
            Span("Pooling", 0, begin + 210, begin + 300, FORWARD),
            Span("_backward_x", 0, begin + 310, begin + 800, BACKWARD),
            Span("gluonpar.allreduce_update", 0, begin + 860, begin + 960, FUSED),
        ]
    profile = Profile(["cpu(0)"], (0, 4000), 4, spans, 1)
    steps = timeline.record(profile, 1, 2)
    assert (steps["window"], steps["num_steps"]) == ([0, 2000], 2)
    assert [span for span in steps["spans"] if span[2] < 1000] == [
        [FORWARD, 0, 0, 300],
        [BACKWARD, 0, 310, 800],
        [FUSED, 0, 860, 960],
    ]
    with pytest.raises(ValueError, match="first=2, num_steps=2"):
        timeline.record(profile, 2, 2)


def test_one_context_is_one_program_whose_samples_are_put_together():
    rows = [
        {"name": name, "workload": "lenet", "num_devices": k, "seconds": [k, k, 10]}
        for name in ("gluonpar", "one context")
        for k in (1, 2, 4)
    ]
    *ours, one, two, four = scaling.pooled([{"median_seconds": 0, **row} for row in rows])
    assert [row["median_seconds"] for row in ours] == [0, 0, 0]
    assert one["median_seconds"] == two["median_seconds"] == four["median_seconds"] == 4


def test_what_is_kept_of_a_benchmark_names_no_path_of_the_machine():
    row = {"name": "book", "workload": "lenet", "num_devices": 1, "batch_size": 8, "pid": 7}
    row.update(median_seconds=0.12345678, quartiles_seconds=[0.1, 0.2], version="/home/me")
    machine = {"processor": "P", "cores": 2, "date": "2026-01-02T03:04:05", "python": "3"}
    arguments = {"steps": 5, "rounds": 12, "warmup": 5, "torch_python": "/home/me/bin/python"}
    kept = scaling.condensed({"machine": machine, "arguments": arguments, "rows": [row]})
    assert "/home" not in json.dumps(kept)
    assert kept["rows"][0]["median_seconds"] == 0.123457
