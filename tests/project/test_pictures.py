"""Pictures: they show the real plans, splits and figures, and their text can be read."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gluonpar.collectives import ALGORITHMS, partition, trace
from gluonpar.models.lenet import LENET_SHAPES
from gluonpar.training.profiler.operators import BACKWARD, DATA, FORWARD, FUSED, OTHER, UPDATE, Span
from gluonpar.training.profiler.timeline import Timeline

pytest.importorskip("matplotlib")

from pictures import scaling, timeline
from pictures.step import draw_step

from gluonpar.collectives import drawing

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*"))
PLANS = [name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None]


def load_script():
    path = ROOT / "tools" / "draw_pictures.py"
    spec = importlib.util.spec_from_file_location("draw_pictures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return load_script()


def profile():
    """Four steps on two devices, a ms each: the second device takes a little longer."""
    spans = []
    for step in range(4):
        begin = 1000 * step
        spans.append(Span("batch", None, 9, begin + 20, begin + 25, DATA))
        for device, late in ((0, 0), (1, 50)):
            spans += [
                Span("Convolution", device, device, begin + late, begin + 200, FORWARD),
                Span("Pooling", device, device, begin + 210, begin + 300, FORWARD),
                Span("DeleteVariable", device, device, begin + 301, begin + 302, OTHER),
                Span("_backward_x", device, device, begin + 310, begin + 800 + late, BACKWARD),
            ]
        spans.append(Span("gluonpar.update", 0, 5, begin + 860, begin + 960, FUSED))
    return Timeline(["cpu(0)", "cpu(1)"], (0, 4000), 4, spans, {}, 2)


def record(book=0.3):
    def row(name, k, seconds, workload="lenet"):
        return {
            "name": name,
            "workload": workload,
            "num_devices": k,
            "batch_size": 256,
            "version": "",
            "median_seconds": seconds,
            "quartiles_seconds": [0.9 * seconds, 1.2 * seconds],
            "seconds": [seconds],
        }

    rows = [row(name, k, t / k) for k in (1, 2) for name, t in (("gluonpar", 0.1), ("book", book))]
    rows += [row("floor", 2, 0.04), row("gluonpar", 2, 9.0, "mlp")]
    machine = {"processor": "P", "cores": 2, "date": "2026-01-02T03:04:05", "python": "3"}
    arguments = {"steps": 5, "rounds": 12, "warmup": 5, "torch_python": "/home/me/bin/python"}
    return {"machine": machine, "arguments": arguments, "rows": rows}


FIGURES = {
    **{name: trace(name, 4).draw for name in PLANS},
    "ring of eight": trace("ring", 8).draw,
    "step": draw_step,
    "step of four": lambda: draw_step(4, 10),
    "step of one": lambda: draw_step(1, 7),
    "timeline": lambda: timeline.draw_timeline(timeline.steps(profile()), "three steps", note="n"),
    "scaling": lambda: scaling.draw_scaling(record(), "lenet", "training", note="a note"),
    "scaling of equals": lambda: scaling.draw_scaling(record(0.101), "lenet", "training"),
}


@pytest.fixture(params=FIGURES, scope="module")
def figure(request):
    return FIGURES[request.param]()


def texts(figure):
    from matplotlib.text import Text

    found = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    assert len(found) > 5
    return found


def extents(figure):
    """Each text's left, bottom, right and top in points, as Agg lays it out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(72)
    canvas = FigureCanvasAgg(figure)
    with drawing.style("test"):
        canvas.draw()
        return {t: t.get_window_extent(canvas.get_renderer()).extents for t in texts(figure)}


class TestAllPictures:
    def test_no_words_are_tiny(self, figure):
        assert min(text.get_size() for text in texts(figure)) >= 8.5

    def test_no_words_are_cut_off(self, figure):
        width, height = figure.get_size_inches() * 72
        for text, (left, bottom, right, top) in extents(figure).items():
            inside = left >= 0 and bottom >= 0 and right <= width and top <= height
            assert inside, (text.get_text(), left, bottom, right, top)

    def test_no_words_overlap(self, figure):
        found = list(extents(figure).items())
        for (text, a), (other, b) in itertools.combinations(found, 2):
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, (text.get_text(), other.get_text())

    def test_the_page_shows_through(self, figure):
        assert figure.get_facecolor()[3] == 0
        assert all(axes.get_facecolor()[3] == 0 or not axes.axison for axes in figure.axes)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
class TestCommitted:
    def test_it_is_an_image_with_a_title_and_a_description(self, path):
        root = ElementTree.parse(path).getroot()
        assert root.get("role") == "img" and root.get("aria-labelledby") == "title desc"
        title, description = root[0], root[1]
        assert (title.tag, description.tag) == tuple(f"{{{SVG}}}{x}" for x in ("title", "desc"))
        assert (title.get("id"), description.get("id")) == ("title", "desc")
        assert 10 < len(title.text) < 80 < len(description.text)

    def test_it_needs_no_font_and_nothing_from_elsewhere(self, path):
        text = path.read_text("utf-8")
        assert "<text" not in text and "font-family" not in text
        assert not re.findall(r'(?:href|src)="(?!#)', text)

    def test_it_has_no_date(self, path):
        assert "dc:date" not in path.read_text("utf-8")


SVG = "http://www.w3.org/2000/svg"


def test_every_picture_is_shown_and_said_in_words():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    shown = {}
    for page in (*pages, *(ROOT / "notebooks").glob("*.ipynb")):
        for alt, link in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text("utf-8")):
            shown.setdefault((page.parent / link).resolve(), []).append(alt)
    assert set(PICTURES) - set(shown) == set()
    assert all(len(alt) > 30 for path in PICTURES for alt in shown[path])


class TestStep:
    @pytest.mark.parametrize(("k", "n"), [(1, 7), (2, 256), (4, 10)])
    def test_the_batch_is_cut_as_split_and_load_cuts_it(self, k, n):
        axes = draw_step(k, n).axes[0]
        heights = {p.get_gid(): p.get_height() for p in axes.patches if hasattr(p, "get_height")}
        words = [text.get_text() for text in axes.texts]
        parts = partition.slices(n, k)
        for device, part in enumerate(parts):
            assert f"{part.start}\u2013{part.stop - 1}" in words
            drawn, size = heights[f"batch-{device}"] + 0.03, part.stop - part.start
            assert drawn / size == pytest.approx((heights["batch-0"] + 0.03) / parts[0].stop)
        for size in set(partition.sizes(n, k)):
            assert words.count(f"{size} losses") == partition.sizes(n, k).count(size)

    @pytest.mark.parametrize("k", [1, 2, 4])
    def test_gradients_travel_as_in_the_plan_of_the_star(self, k):
        gids = [patch.get_gid() or "" for patch in draw_step(k, 8).axes[0].patches]
        drawn = sorted(gid for gid in gids if gid.startswith("hop-"))
        assert drawn == sorted(
            f"hop-{h.step}-{h.src}-{h.dst}-{h.chunk}-{'add' if h.reduce else 'copy'}"
            for h in ALGORITHMS["star"].plan(k)
        )

    def test_a_sum_has_the_colours_of_all_devices_and_replicas_have_none(self):
        from matplotlib.colors import to_hex

        found = {p.get_gid(): to_hex(p.get_facecolor()) for p in draw_step(3, 9).axes[0].patches}
        for device, array in itertools.product(range(3), range(len(LENET_SHAPES))):
            summed = [found[f"sum-{device}-{array}-{j}"] for j in range(3)]
            assert summed == list(drawing.COLOURS[:3])
            assert found[f"grads-{device}-{array}-0"] == drawing.COLOURS[device]
            both = found[f"params-{device}-{array}-0"], found[f"updated-{device}-{array}-0"]
            assert both == (drawing.GREY, drawing.GREY)

    def test_only_the_update_divides_and_by_the_whole_batch(self):
        words = [text.get_text() for text in draw_step(2, 100).axes[0].texts]
        assert words.count("lr / 100 * sum") == 2 and sum("/" in word for word in words) == 2

    @pytest.mark.parametrize(("k", "n"), [(0, 5), (3, 2)])
    def test_impossible_steps_are_refused(self, k, n):
        with pytest.raises(ValueError, match=f"num_devices={k}, batch_size={n}; give one device"):
            draw_step(k, n)


class TestTimeline:
    def test_steps_begin_where_a_device_goes_forward_after_backward(self):
        cut = timeline.steps(profile(), first=1, num_steps=2)
        assert (cut.window, cut.num_steps, cut.devices) == ((0, 2000), 2, ["cpu(0)", "cpu(1)"])
        first = [(s.part, s.device, s.start, s.end) for s in cut.spans if s.start < 1000]
        assert first == [
            (FORWARD, 0, 0, 300),
            (BACKWARD, 0, 310, 800),
            (FUSED, 0, 860, 960),
            (OTHER, 0, 301, 302),
            (FORWARD, 1, 50, 300),
            (BACKWARD, 1, 310, 850),
            (OTHER, 1, 301, 302),
            (DATA, None, 20, 25),
        ]

    def test_the_sentence_is_that_of_the_steps_drawn(self):
        cut = timeline.steps(profile(), 0, 3)
        assert cut.shares()["exchange"] == pytest.approx(0.1)
        assert cut.sentence().startswith("2 devices: 79.1% of a step is compute, 5.0% waiting")

    @pytest.mark.parametrize(("first", "num_steps"), [(0, 4), (3, 1), (-1, 1), (0, 0)])
    def test_steps_that_were_not_seen_whole_are_refused(self, first, num_steps):
        words = f"first={first}, num_steps={num_steps}: the profile has 3 whole steps"
        with pytest.raises(ValueError, match=words):
            timeline.steps(profile(), first, num_steps)

    def test_a_record_makes_the_same_timeline(self):
        cut = timeline.steps(profile())
        again = timeline.from_dict(json.loads(json.dumps(timeline.as_dict(cut))))
        assert vars(again) == vars(cut)

    def test_a_trace_file_makes_the_same_timeline(self):
        seen = profile()
        marks = [Span(f"step {i}", None, 9, 1000 * i, 1000 * i + 1000, "step") for i in range(4)]
        again = timeline.from_trace(json.loads(json.dumps(seen.trace(marks))), processors=2)
        assert (again.devices, again.num_steps, again.window) == (seen.devices, 4, (0, 4000))
        assert [s._replace(thread=0) for s in again.spans] == [
            s._replace(thread=0) for s in seen.spans
        ]

    def test_every_span_is_drawn_where_and_as_long_as_it_ran(self):
        cut = timeline.steps(profile())
        axes = timeline.draw_timeline(cut, "t").axes[0]
        left, right = timeline.LEFT, timeline.RIGHT
        drawn = {}
        for patch in axes.patches:
            if patch.get_gid():
                start = (patch.get_x() - left) / (right - left) * 3000
                end = start + patch.get_width() / (right - left) * 3000
                drawn.setdefault(patch.get_gid().split("-")[1:3][0], []).append((start, end))
        for device, name in ((0, "0"), (1, "1"), (None, "Python")):
            mine = [(s.start, s.end) for s in cut.spans if s.device == device and s.part != OTHER]
            assert len(drawn[name]) == len(mine)
            shortest = timeline.LEAST / (right - left) * 3000
            ran = sorted((start, max(end, start + shortest)) for start, end in mine)
            for got, want in zip(sorted(drawn[name]), ran):
                assert got == pytest.approx(want, abs=1e-6)

    def test_exchange_and_update_have_a_row_of_their_own_only_if_there_are_any(self):
        def rows(seen):
            axes = timeline.draw_timeline(timeline.steps(seen), "t").axes[0]
            return [t.get_text() for t in axes.texts if t.get_ha() == "right"]

        seen = profile()
        assert rows(seen) == ["cpu(0)", "cpu(1)", "exchange\nand update", "Python"]
        spans = [s._replace(part=UPDATE if s.part == FUSED else s.part) for s in seen.spans]
        apart = Timeline(seen.devices, seen.window, 4, spans, {}, 2)
        assert rows(apart) == ["cpu(0)", "cpu(1)", "Python"]

    def test_the_picture_in_words(self, tmp_path):
        timeline.draw_timeline(timeline.steps(profile()), "three steps", tmp_path / "t.svg")
        root = ElementTree.parse(tmp_path / "t.svg").getroot()
        assert root[0].text == "three steps"
        assert "3 steps of 1.0 ms each" in root[1].text
        assert "forward 0.3 ms and backward 0.5 ms on cpu(0)" in root[1].text


class TestScaling:
    def panels(self, **more):
        return scaling.draw_scaling(record(), "lenet", "t", **more).axes

    def test_bars_are_the_medians_the_fastest_first_and_the_floor_is_a_line(self):
        bars = self.panels()[2]
        widths = {p.get_gid(): p.get_width() for p in bars.patches if p.get_gid()}
        assert widths == pytest.approx({"bar-gluonpar": 50.0, "bar-book": 150.0})
        names = [label.get_text() for label in bars.get_yticklabels()]
        assert names == ["gluonpar", "the book's loop,\nas MXNet comes"]
        (floor,) = [line for line in bars.lines if line.get_gid() == "bar-floor"]
        assert list(floor.get_xdata()) == pytest.approx([40.0, 40.0])

    def test_lines_are_images_a_second(self):
        lines = {line.get_gid(): line for line in self.panels()[1].lines if line.get_gid()}
        assert set(lines) == {"line-gluonpar", "line-book"}
        assert list(lines["line-gluonpar"].get_ydata()) == pytest.approx([2560, 5120])
        assert list(lines["line-book"].get_ydata()) == pytest.approx([256 / 0.3, 512 / 0.3])

    def test_what_was_not_measured_is_refused(self):
        with pytest.raises(ValueError, match=r"nothing .* 'lenet' on 3 devices; .*\('mlp', 2\)"):
            self.panels(num_devices=3)

    def test_the_picture_in_words(self, tmp_path):
        self.panels(path=tmp_path / "s.svg")
        description = ElementTree.parse(tmp_path / "s.svg").getroot()[1].text
        assert "gluonpar 2560 with 1, 5120 with 2" in description
        assert "gluonpar 50, the book's loop, as MXNet comes 150; the same devices without any" in (
            description
        )

    def test_condensed_keeps_the_picture_and_no_paths(self, tmp_path):
        whole, small = record(), scaling.condensed(record())
        assert "/home" not in json.dumps(small) and "seconds" not in small["rows"][0]
        for name, content in (("whole", whole), ("small", small)):
            scaling.draw_scaling(content, "lenet", "t", path=tmp_path / f"{name}.svg")
        assert (tmp_path / "whole.svg").read_bytes() == (tmp_path / "small.svg").read_bytes()


class TestPaper:
    def test_drawn_twice_the_bytes_are_the_same(self, tmp_path):
        for name in "ab":
            draw_step(2, 256, tmp_path / f"{name}.svg")
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()

    def test_settings_of_the_user_s_change_nothing_and_stay(self, tmp_path):
        import matplotlib

        draw_step(2, 256, tmp_path / "a.svg")
        with matplotlib.rc_context({"font.family": ["serif"], "svg.fonttype": "none"}):
            draw_step(2, 256, tmp_path / "b.svg")
            assert matplotlib.rcParams["svg.fonttype"] == "none"
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()

    def test_other_formats(self, tmp_path):
        draw_step(2, 256, tmp_path / "step.png")
        assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


class TestScript:
    def test_the_committed_pictures_are_what_is_drawn(self, script, capfd):
        assert script.main(["--check"]) == 0
        assert capfd.readouterr().err == ""

    def test_what_differs_is_named(self, script, tmp_path, capfd):
        folder = tmp_path / "new"
        assert script.main(["--folder", str(folder)]) == 0
        assert script.main(["--folder", str(folder), "--check"]) == 0
        for name, old, new in (
            ("ring", "hop-0-0-1-0-add", "hop-0-0-2-0-add"),
            ("star", "<!-- step 3 -->", "<!-- step 4 -->"),
            ("scaling", '<desc id="desc">Left', '<desc id="desc">Right'),
        ):
            path = folder / f"{name}.svg"
            text = path.read_text("utf-8")
            assert old in text
            path.write_text(text.replace(old, new), "utf-8")
        (folder / "tree.svg").unlink()
        (folder / "sun.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
        assert script.main(["--folder", str(folder), "--check"]) == 1
        said = capfd.readouterr().err
        assert re.findall(r"(\S+)\.svg is not what would be drawn", said) == [
            str(folder / name) for name in ("ring", "scaling", "star", "sun", "tree")
        ]
        assert "to draw them again: python tools/draw_pictures.py" in said

    @pytest.mark.parametrize(("moved", "same"), [(0.5, True), (3, False)])
    def test_a_shape_that_lies_elsewhere_is_another_picture(self, script, tmp_path, moved, same):
        for name, x in (("a", 10), ("b", 10 + moved)):
            shape = f'<g id="bar-x"><path d="M {x} 5 L 20 30.5"/></g>'
            (tmp_path / f"{name}.svg").write_text(f'<svg xmlns="{SVG}">{shape}</svg>')
        assert script.same(tmp_path / "a.svg", tmp_path / "b.svg") is same

    def test_other_figures_are_another_picture(self, script, tmp_path, capfd):
        folder, measured = tmp_path / "pictures", tmp_path / "measured"
        measured.mkdir()
        for name in ("step-timeline", "scaling"):
            (measured / f"{name}.json").write_bytes((script.MEASURED / f"{name}.json").read_bytes())
        where = ["--folder", str(folder), "--measured", str(measured)]
        assert script.main(where) == 0
        seen = script._read(measured / "step-timeline.json")
        seen["spans"][0][3] += 4000  # the first forward takes 4 ms more
        script._write(measured / "step-timeline.json", seen)
        assert script.main([*where, "--check"]) == 1
        assert capfd.readouterr().err.count(" is not what would be drawn") == 1

    def test_a_profile_is_recorded_and_drawn(self, script, tmp_path, capfd):
        where = ["--folder", str(tmp_path), "--measured", str(tmp_path)]
        (tmp_path / "scaling.json").write_bytes((script.MEASURED / "scaling.json").read_bytes())
        assert script.main([*where, "--record", "timeline"]) == 0
        seen = script._read(tmp_path / "step-timeline.json")
        assert seen["command"] == "python tools/draw_pictures.py --record timeline"
        assert seen["num_steps"] == 3 and seen["devices"] == ["cpu(0)", "cpu(1)"]
        parts = {(part, device) for part, device, _, _ in seen["spans"]}
        assert parts >= {(p, d) for p in (FORWARD, BACKWARD) for d in (0, 1)} | {(FUSED, 0)}
        assert timeline.from_dict(seen).sentence() in capfd.readouterr().out

    def test_a_benchmark_is_recorded_and_drawn(self, script, tmp_path, monkeypatch):
        def run(command):
            asked.append(command)
            Path(command[command.index("--json") + 1]).write_text(json.dumps(record()))
            return subprocess.CompletedProcess(command, 1)

        asked = []
        (tmp_path / "step-timeline.json").write_bytes(
            (script.MEASURED / "step-timeline.json").read_bytes()
        )
        monkeypatch.setattr(script.subprocess, "run", run)
        where = ["--folder", str(tmp_path), "--measured", str(tmp_path)]
        assert script.main([*where, "--record", "scaling", "--torch-python", "/t/python"]) == 1
        (command,) = asked
        assert command[command.index("--torch-python") + 1] == "/t/python"
        kept = script._read(tmp_path / "scaling.json")
        assert kept.pop("command") == "python tools/draw_pictures.py --record scaling"
        assert kept == scaling.condensed(record())
        assert (tmp_path / "scaling.svg").exists()

    def test_what_cannot_be_recorded_is_refused(self, script, capfd):
        with pytest.raises(SystemExit) as ended:
            script.main(["--record", "cake"])
        assert ended.value.code == 2
        assert "no 'cake' to record; there are: timeline, scaling" in capfd.readouterr().err

    @pytest.mark.parametrize("name", ["step-timeline", "scaling"])
    def test_what_is_committed_names_no_place_of_a_machine(self, script, name):
        text = (script.MEASURED / f"{name}.json").read_text("utf-8")
        assert not re.findall(r"/(?:home|tmp|work|usr|root)\b", text)
        assert text.startswith('{\n "command": "python tools/')
