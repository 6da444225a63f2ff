"""The committed pictures are what tools/draw_pictures.py draws, and every page describes them."""

from __future__ import annotations

import json
import re
import shutil
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from gluonpar.collectives import ALGORITHMS
from gluonpar.training.timeline import BACKWARD, DATA, FORWARD, FUSED, Span, Timeline

pytest.importorskip("matplotlib")

import draw_pictures
from matplotlib.patches import Rectangle
from matplotlib.path import Path as Outline
from matplotlib.transforms import Affine2D, Bbox
from pictures import scaling, timeline

from gluonpar.plans import drawing

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
MEASURED = sorted((ROOT / "docs" / "measured").glob("*.svg"))
SVG, LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
CODES = dict(zip("MLQCz", (Outline.MOVETO, Outline.LINETO, 3, 4, Outline.CLOSEPOLY)))


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


class Drawn:
    """What an SVG file of matplotlib's shows, in its coordinates.

    ``words`` are lines of text with the boxes around them; ``shapes`` the outlines of everything
    else that is visible, as polygons, with half the width of the pen.
    """

    def __init__(self, path):
        builder = ElementTree.TreeBuilder(insert_comments=True)  # text is in comments
        root = ElementTree.parse(path, ElementTree.XMLParser(target=builder)).getroot()
        self.sheet = Bbox.from_bounds(*map(float, root.get("viewBox").split()))
        self.shapes, lines = [], []
        self._named = {element.get("id"): element for element in root.iter(f"{SVG}path")}
        self._walk(root, Affine2D(), lines, None)
        self.words = [(text, Bbox.union(glyphs)) for text, glyphs in lines if glyphs]

    def _walk(self, element, outer, lines, glyphs):
        to, source, style = transform(element) + outer, element, properties(element)
        if element.tag == f"{SVG}use":
            source = self._named[element.get(LINK)[1:]]
            to, style = transform(source) + to, {**properties(source), **style}
        if source.tag == f"{SVG}path" and source.get("d"):
            outline = polygons(source.get("d"), to)
            pen = float(style.get("stroke-width", 1)) / 2 if "stroke" in style else 0
            if glyphs is not None:
                glyphs += [Bbox([polygon.min(axis=0), polygon.max(axis=0)]) for polygon in outline]
            elif style.get("fill") != "none" or pen:
                self.shapes += [(polygon, pen) for polygon in outline]
        is_text = element.get("id", "").startswith("text_")
        for child in element:
            if child.tag is ElementTree.Comment:
                lines.append((child.text.strip(), []))
            elif child.tag != f"{SVG}defs":
                self._walk(child, to, lines, lines[-1][1] if is_text else glyphs)

    def collisions(self, gap=1):
        """The words that leave the sheet or are less than ``gap`` from other words or an outline.

        Words may lie inside a shape, such as a lane or a circle.
        """
        pairs = combinations(self.words, 2)
        found = [a[0] for a, b in pairs if a[1].padded(gap).overlaps(b[1])]
        low = np.array([polygon.min(axis=0) - pen for polygon, pen in self.shapes])
        high = np.array([polygon.max(axis=0) + pen for polygon, pen in self.shapes])
        for text, box in self.words:
            if not all(self.sheet.contains(*corner) for corner in box.corners()):
                found.append(text)
            near = np.all((low < box.max + gap) & (high > box.min - gap), axis=1)
            for polygon, pen in (self.shapes[i] for i in np.flatnonzero(near)):
                if Outline(polygon).intersects_bbox(box.padded(gap + pen), filled=False):
                    found.append(text)
        return found


def properties(element):
    return dict(re.findall(r"([\w-]+): ([^;]+)", element.get("style", "")))


def transform(element):
    made = Affine2D().translate(float(element.get("x", 0)), float(element.get("y", 0)))
    for name, text in reversed(re.findall(r"(\w+)\(([^)]*)\)", element.get("transform", ""))):
        numbers = [float(number) for number in re.split("[ ,]+", text.strip())]
        getattr(made, {"rotate": "rotate_deg"}.get(name, name))(*numbers)
    return made


def polygons(text, to):
    parts = re.findall("([MLQCz])([^MLQCz]*)", text)
    points = [np.reshape([float(n) for n in part.split()] or [0, 0], (-1, 2)) for _, part in parts]
    codes = [CODES[letter] for (letter, _), some in zip(parts, points) for _ in some]
    return Outline(np.concatenate(points), codes).transformed(to).to_polygons(closed_only=False)


@pytest.mark.parametrize("path", PICTURES + MEASURED, ids=lambda path: path.stem)
def test_no_words_touch_a_shape_or_other_words_or_leave_the_picture(path):
    drawn = Drawn(path)
    assert len(drawn.words) > 8 and len(drawn.shapes) > 8
    assert drawn.collisions() == []


@pytest.mark.parametrize(
    ("x", "y", "words", "collides"),
    [(2, 2, "in", False), (2, 5, "on", True), (7, 7, "free", False), (7, 5, "arrow", True)]
    + [(7, 2, "others", True), (9.8, 7, "out", True)],
)
def test_words_that_touch_something_are_found(tmp_path, x, y, words, collides):
    with drawing.style("collisions"):
        figure, axes = drawing.sheet(10, 10)
        axes.add_patch(Rectangle((1, 1), 4, 4, fc="grey", lw=0))
        drawing.arrow(axes, (6, 4.9), (9, 5.1), "grey")
        axes.text(7.3, 2, "words")
        axes.text(x, y, words)
        drawing.save(figure, tmp_path / "words.svg", "words", "words and shapes")
    assert bool(Drawn(tmp_path / "words.svg").collisions()) is collides


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
    profile = Timeline(["cpu(0)"], (0, 4000), 4, spans, 1)
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
