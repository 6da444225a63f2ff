"""Draw every picture of docs/pictures: plans, the training step, recorded runs.

    python tools/draw_pictures.py                    # write docs/pictures/*.svg and the page's data
    python tools/draw_pictures.py --check            # write nothing, name the ones that differ
    python tools/draw_pictures.py --record timeline  # measure first, half a minute
    python tools/draw_pictures.py --record page      # photograph the page; needs chromium
    python tools/draw_pictures.py --record timeline,scaling --torch-python ~/torch/bin/python
        --tensorflow-python ~/tensorflow/bin/python --jax-python ~/jax/bin/python

Every algorithm that has a plan is drawn for 4 devices. docs/assets/step-by-step/plans.js has
all plans and topologies, for docs/step-by-step.html; step-by-step.png is a picture of that page,
which --record page takes and --check does not compare. step-timeline.svg and scaling.svg show
docs/measured/step-timeline.json and scaling.json, which --record writes: run it on an otherwise
idle machine. --check compares words and the coordinates of named shapes, not bytes, because those
differ between versions of matplotlib.

Exit status: 0, success; 1, pictures differ or are missing, or a candidate of the benchmark failed;
2, wrong arguments.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Sequence
from xml.etree import ElementTree

try:
    from pictures import growth, plans, scaling, step, timeline
    from PIL import Image

    from gluonpar.collectives import ALGORITHMS, trace
    from gluonpar.diagnostics import harness
    from gluonpar.training import Configuration, Console, Run
except ImportError as error:
    remedy = "in a clone: pip install -e '.[cpu,plot]'"
    print(f"draw_pictures.py: error: {error} ({remedy})", file=sys.stderr)
    sys.exit(2)

ROOT = Path(__file__).resolve().parents[1]
PICTURES, MEASURED = ROOT / "docs" / "pictures", ROOT / "docs" / "measured"
PLANS = ROOT / "docs" / "assets" / "step-by-step" / "plans.js"
TIMELINE, SCALING = MEASURED / "step-timeline.json", MEASURED / "scaling.json"
FIRST_STEP, NUM_STEPS = 8, 3  # of the profile
PAGE = ROOT / "docs" / "step-by-step.html"
MOMENT = "lang=en&theme=light&algorithm=halving-doubling&with=ring&topology=ethernet&t=1220"
CANDIDATES = (
    "gluonpar,gluonpar trainer,trainer gluonpar,trainer device,one context,one context imported,"
    "book,torch ddp,tensorflow mirrored,jax shard_map,no exchange"
)
LIBRARIES = ("torch", "tensorflow", "jax")
BENCHMARK = "--workload lenet --num-gpus 1,2,4 --device cpu --rounds 12 --steps 5".split()
TOLERANCE = 1.0  # in points: fonts differ a little between versions of matplotlib
SVG = "{http://www.w3.org/2000/svg}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="compare only, and name what differs")
    help_ = "measure before drawing: one or several of timeline, scaling and page"
    parser.add_argument("--record", metavar="NAMES", default="", help=help_)
    for library in LIBRARIES:
        help_ = f"an interpreter that has {library}, for --record scaling"
        parser.add_argument(f"--{library}-python", metavar="PATH", help=help_)
    args = parser.parse_args(argv)
    names = args.record.split(",") if args.record else []
    if not set(names) <= {"timeline", "scaling", "page"}:
        parser.error(f"--record must name timeline, scaling or page, got {args.record}")
    if args.check:
        return max(check(PICTURES), check_plans(PLANS))
    if "timeline" in names:
        record_timeline()
    pythons = {f"--{name}-python": getattr(args, f"{name}_python") for name in LIBRARIES}
    status = record_scaling(pythons) if "scaling" in names else 0
    draw(PICTURES)
    PLANS.write_text(plans.text(), "utf-8")
    if "page" in names:
        photograph_page()
    return status


def draw(folder: Path) -> None:
    """Write all pictures into ``folder``."""
    for name, algorithm in ALGORITHMS.items():
        if algorithm.plan is not None:
            trace(name, 4).draw(folder / f"{name}.svg")
    trace("halving-doubling", 6).draw(folder / "halving-doubling-6.svg")
    step.draw(folder / "step.svg")
    growth.draw(folder / "growth.svg")
    steps = json.loads(TIMELINE.read_text("utf-8"))
    title = (
        f"{steps['num_steps']} steps of LeNet, batch 256, on {len(steps['devices'])} CPU devices"
    )
    timeline.draw(steps, title, _measured(steps), folder / "step-timeline.svg")
    record = json.loads(SCALING.read_text("utf-8"))
    note = (
        f"{_measured(record)}. Medians and quartiles of {record['arguments']['rounds']} rounds of "
        f"{record['arguments']['steps']} steps, the candidates taking turns. All devices share the "
        "cores. One context, the dashed grey line, uses all of them by itself: data parallelism "
        "gains as much as gluonpar's line is above it."
    )
    title = "Training LeNet, batch 256, on CPU devices"
    scaling.draw(record, "lenet", 2, title, note, folder / "scaling.svg")


def _measured(record: dict[str, Any]) -> str:
    machine = record["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores"
    return f"Measured {machine['date'][:10]} on {where}: {record['command']}"


def _write(path: Path, record: dict[str, Any]) -> None:
    """Write JSON with one line per innermost list, so that a diff can be read."""
    text = json.dumps(record, indent=1)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    path.write_text(text + "\n", "utf-8")


def record_timeline() -> None:
    """Profile a run of LeNet on two CPU devices and keep some of its steps."""
    configuration = Configuration(2, num_epochs=1, device="cpu", dataset="synthetic", profile=True)
    run = Run(configuration, Console(io.StringIO(), io.StringIO()))
    run.train()
    machine = {key: harness.machine()[key] for key in ("processor", "cores", "date")}
    command = "python tools/draw_pictures.py --record timeline"
    steps = timeline.record(run.profiler.timeline, FIRST_STEP, NUM_STEPS)
    _write(TIMELINE, {"command": command, "machine": machine, **steps})


def record_scaling(pythons: dict[str, str | None]) -> int:
    """Run the training benchmark and keep its figures; return its exit status."""
    command = [sys.executable, "-m", "benchmarks.training", *BENCHMARK, "--candidates", CANDIDATES]
    command += [word for option in pythons.items() if option[1] for word in option]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.json"
        status = subprocess.run([*command, "--json", str(path)], cwd=ROOT).returncode
        record = scaling.condensed(json.loads(path.read_text("utf-8")))
    command = "python tools/draw_pictures.py --record scaling"
    _write(SCALING, {"command": command, **record})
    return status


def photograph_page() -> None:
    """Draw docs/step-by-step.html at a moment, as a browser shows it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    picture = PICTURES / "step-by-step.png"
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [
            f"--user-data-dir={profile}",
            "--window-size=1180,880",
            f"--screenshot={picture}",
        ]
        subprocess.run([browser, *options, f"{PAGE.as_uri()}#{MOMENT}"], check=True)
    with Image.open(picture) as image:
        few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    few.save(picture, optimize=True)  # a third of the bytes


def check(folder: Path) -> int:
    """Name the pictures in ``folder`` that differ from what :func:`draw` writes; 1 if any do."""
    with tempfile.TemporaryDirectory() as fresh:
        draw(Path(fresh))
        names = {path.name for place in (folder, Path(fresh)) for path in place.glob("*.svg")}
        wrong = [name for name in sorted(names) if not same(folder / name, Path(fresh) / name)]
    for name in wrong:
        print(f"{folder / name} must be drawn again: make pictures", file=sys.stderr)
    return 1 if wrong else 0


def check_plans(path: Path) -> int:
    """Name the data of the page if it is not that of the package; 1 in this case."""
    if path.exists() and path.read_text("utf-8") == plans.text():
        return 0
    print(f"{path} must be written again: make pictures", file=sys.stderr)
    return 1


def same(path: Path, other: Path) -> bool:
    """Whether two pictures have the same words and the same named shapes in the same places."""
    if not (path.exists() and other.exists()):
        return False
    (words, shapes), (other_words, other_shapes) = content(path), content(other)
    return (
        words == other_words
        and shapes.keys() == other_shapes.keys()
        and all(
            len(shapes[name]) == len(other_shapes[name])
            and all(abs(a - b) <= TOLERANCE for a, b in zip(shapes[name], other_shapes[name]))
            for name in shapes
        )
    )


def content(path: Path) -> tuple[list[str], dict[str, list[float]]]:
    """Return a picture's words, sorted, and by its id the coordinates of every named shape.

    matplotlib keeps text that it draws as outlines in comments. Its own ids have no '-'.
    """
    builder = ElementTree.TreeBuilder(insert_comments=True)
    root = ElementTree.fromstring(path.read_bytes(), ElementTree.XMLParser(target=builder))
    words, shapes = [], {}
    for element in root.iter():
        if element.tag in (ElementTree.Comment, f"{SVG}title", f"{SVG}desc"):
            words.append(str(element.text).strip())
        elif element.tag == f"{SVG}g" and "-" in element.get("id", ""):
            paths = " ".join(found.get("d", "") for found in element.iter(f"{SVG}path"))
            numbers = re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", paths)
            shapes[element.get("id", "")] = [float(number) for number in numbers]
    return sorted(words), shapes


if __name__ == "__main__":
    sys.exit(main())
