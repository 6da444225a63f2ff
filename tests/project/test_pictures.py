"""The committed pictures are what tools/draw_pictures.py draws, and every page describes them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gluonpar.collectives import ALGORITHMS
from gluonpar.training.timeline import BACKWARD, DATA, FORWARD, FUSED, Span, Timeline

pytest.importorskip("matplotlib")

import draw_pictures
from pictures import scaling, timeline

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))


@pytest.mark.slow
def test_the_committed_pictures_are_what_is_drawn(capfd):
    assert draw_pictures.main(["--check"]) == 0
    assert capfd.readouterr().err == ""


def test_every_algorithm_with_a_plan_has_a_picture():
    plans = {name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None}
    assert plans <= {path.stem for path in PICTURES}


@pytest.mark.slow
def test_pictures_that_differ_are_named(tmp_path, capfd):
    for path in PICTURES:
        shutil.copy(path, tmp_path)
    for name, old, new in (
        ("ring", "hop-0-0-1-0-add", "hop-0-0-2-0-add"),
        ("star", "<!-- step 3 -->", "<!-- step 4 -->"),
        ("step", '<desc id="desc">One lane', '<desc id="desc">Two lanes'),
    ):
        path = tmp_path / f"{name}.svg"
        text = path.read_text("utf-8")
        assert old in text
        path.write_text(text.replace(old, new), "utf-8")
    (tmp_path / "tree.svg").unlink()
    (tmp_path / "sun.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    assert draw_pictures.check(tmp_path) == 1
    named = re.findall(r"(\w+)\.svg must be drawn again", capfd.readouterr().err)
    assert named == ["ring", "star", "step", "sun", "tree"]


@pytest.mark.parametrize(("moved", "same"), [(0.5, True), (3, False)])
def test_a_shape_may_move_by_less_than_a_point(tmp_path, moved, same):
    for name, x in (("a", 10), ("b", 10 + moved)):
        shape = f'<g id="bar-x"><path d="M {x} 5 L 20 30.5"/></g>'
        (tmp_path / name).write_text(f'<svg xmlns="http://www.w3.org/2000/svg">{shape}</svg>')
    assert draw_pictures.same(tmp_path / "a", tmp_path / "b") is same


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_a_title_and_a_description_and_needs_no_font(path):
    text = path.read_text("utf-8")
    title, description = ElementTree.fromstring(text)[:2]
    assert title.tag.endswith("title") and len(title.text) > 5
    assert description.tag.endswith("desc") and len(description.text) > 50
    assert "<text" not in text


def test_every_picture_is_shown_on_a_page_and_has_alternative_text():
    shown = {}
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for page in (*pages, *(ROOT / "notebooks").glob("*.ipynb")):
        for text, link in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text("utf-8")):
            shown.setdefault((page.parent / link).resolve(), []).append(text)
    assert set(PICTURES) <= set(shown)
    assert all(len(text) > 8 for texts in shown.values() for text in texts)


def test_a_timeline_holds_whole_steps_from_a_device_s_first_forward():
    spans = []
    for begin in range(0, 4000, 1000):
        spans += [
            Span("batch", None, 9, begin + 20, begin + 25, DATA),
            Span("Convolution", 0, 0, begin, begin + 200, FORWARD),
            Span("Pooling", 0, 0, begin + 210, begin + 300, FORWARD),
            Span("_backward_x", 0, 0, begin + 310, begin + 800, BACKWARD),
            Span("gluonpar.update", 0, 5, begin + 860, begin + 960, FUSED),
        ]
    profile = Timeline(["cpu(0)"], (0, 4000), 4, spans, {}, 1)
    steps = timeline.record(profile, 1, 2)
    assert (steps["window"], steps["num_steps"]) == ([0, 2000], 2)
    assert [span for span in steps["spans"] if span[2] < 1000] == [
        [FORWARD, 0, 0, 300],
        [BACKWARD, 0, 310, 800],
        [FUSED, 0, 860, 960],
        [DATA, None, 20, 25],
    ]
    with pytest.raises(ValueError, match="first=2, num_steps=2"):
        timeline.record(profile, 2, 2)


def test_what_is_kept_of_a_benchmark_names_no_path_of_the_machine():
    row = {"name": "book", "workload": "lenet", "num_devices": 1, "batch_size": 8, "pid": 7}
    row.update(median_seconds=0.12345678, quartiles_seconds=[0.1, 0.2], version="/home/me")
    machine = {"processor": "P", "cores": 2, "date": "2026-01-02T03:04:05", "python": "3"}
    arguments = {"steps": 5, "rounds": 12, "warmup": 5, "torch_python": "/home/me/bin/python"}
    kept = scaling.condensed({"machine": machine, "arguments": arguments, "rows": [row]})
    assert "/home" not in json.dumps(kept)
    assert kept["rows"][0]["median_seconds"] == 0.123457
