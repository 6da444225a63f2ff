"""Draw all pictures of docs/pictures: from plans, from the step's split, from recorded runs.

    python tools/draw_pictures.py                    # write docs/pictures/*.svg
    python tools/draw_pictures.py --check            # write nothing; are they what is drawn?
    python tools/draw_pictures.py --record timeline  # first measure anew, half a minute
    python tools/draw_pictures.py --record scaling --torch-python ~/torch/bin/python
    python tools/draw_pictures.py --record timeline,scaling   # both, then draw all

The hops of every algorithm with a plan are drawn for 4 devices, halving-doubling for 6 as well.
step-timeline.svg and scaling.svg show what docs/measured/step-timeline.json and scaling.json hold;
--record writes these, and needs a machine that does nothing else. --check compares shapes by their
names and places, and words, not bytes, which differ between versions of matplotlib.

Exit status: 0, all is written or right; 1, the files named differ or are missing, or a benchmark's
candidate failed; 2, for a request that cannot be met.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Sequence
from xml.etree import ElementTree

try:
    from pictures import scaling, step, timeline

    from gluonpar.collectives import ALGORITHMS, trace
    from gluonpar.diagnostics.benchmark import measure
    from gluonpar.training import console
    from gluonpar.training.run import Configuration, Run
except ImportError as error:
    remedy = " (in a clone: pip install -e '.[cpu,plot]')" if error.name == "gluonpar" else ""
    print(f"draw_pictures.py: error: {error}{remedy}", file=sys.stderr)
    sys.exit(2)

ROOT = Path(__file__).resolve().parents[1]
PICTURES, MEASURED = ROOT / "docs" / "pictures", ROOT / "docs" / "measured"
NUM_DEVICES = 4
MORE = {"halving-doubling-6": ("halving-doubling", 6)}
FIRST, NUM_STEPS = 8, 3  # of the profile's steps, which are drawn
CANDIDATES = (
    "gluonpar,gluonpar trainer,trainer gluonpar,trainer device,one context,book,torch ddp,floor"
)
BENCHMARK = "--workload lenet --num-gpus 1,2,4 --device cpu --rounds 12 --steps 5".split()
TOLERANCE = 1.0  # points that a shape may lie elsewhere: fonts differ between matplotlib's versions
SVG = "{http://www.w3.org/2000/svg}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    args = _parser().parse_args(argv)
    if args.check:
        return check(args.folder, args.measured)
    failed = 0
    for what in args.record:
        failed = RECORDERS[what](args) or failed
    draw(args.folder, args.measured)
    return failed


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="compare only, and name what differs")
    help_ = "measure anew before drawing: timeline, scaling or both"
    parser.add_argument("--record", type=_recorders, default=[], metavar="A,B", help=help_)
    help_ = "an interpreter that has PyTorch, for --record scaling"
    parser.add_argument("--torch-python", metavar="PATH", help=help_)
    for name, default, what in (
        ("--folder", PICTURES, "pictures"),
        ("--measured", MEASURED, "recorded runs"),
    ):
        help_ = f"where the {what} are (default: %(default)s)"
        parser.add_argument(name, type=Path, default=default, help=help_)
    return parser


def _recorders(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in RECORDERS:
            there = ", ".join(RECORDERS)
            raise argparse.ArgumentTypeError(f"there is no {name!r} to record; there are: {there}")
    return names


def wanted(measured: Path = MEASURED) -> dict[str, Callable[[Path], Any]]:
    """By the picture's name, what draws it into a file."""
    plans = [name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None]
    hops = {**{name: (name, NUM_DEVICES) for name in plans}, **MORE}
    return {
        **{name: trace(*what).draw for name, what in hops.items()},
        "step": lambda path: step.draw_step(path=path),
        "step-timeline": lambda path: _timeline(_read(measured / "step-timeline.json"), path),
        "scaling": lambda path: _scaling(_read(measured / "scaling.json"), path),
    }


def draw(folder: Path, measured: Path = MEASURED) -> None:
    """Write all pictures into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in wanted(measured).items():
        drawing(folder / f"{name}.svg")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def _write(path: Path, record: dict[str, Any]) -> None:
    """As JSON with a line for each item of the innermost lists, so that changes can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    path.write_text(text + "\n", "utf-8")


def _where(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return f"Measured {machine['date'][:10]} on {machine['processor']}, {machine['cores']} cores"


def _timeline(record: dict[str, Any], path: Path) -> None:
    steps = timeline.from_dict(record)
    title = f"{steps.num_steps} steps of LeNet, batch 256, on {len(steps.devices)} CPU devices"
    timeline.draw_timeline(steps, title, path, f"{_where(record)}: {record['command']}")


def _scaling(record: dict[str, Any], path: Path) -> None:
    arguments = record["arguments"]
    note = (
        f"{_where(record)}: {record['command']}. Medians and quartiles of {arguments['rounds']} "
        f"rounds of {arguments['steps']} steps, all candidates in turns; K devices share the cores."
    )
    title = "Training LeNet, batch 256, on CPU devices"
    scaling.draw_scaling(record, "lenet", title, 2, path, note)


def record_timeline(args: argparse.Namespace) -> int:
    """Profile a run of LeNet on two CPU devices and keep some of its steps."""
    asked = Configuration(2, num_epochs=1, device="cpu", dataset="synthetic", profile=True)
    run = Run(asked, console.Console(io.StringIO(), io.StringIO()))
    run.train()
    found = timeline.steps(run.profiled.timeline, FIRST, NUM_STEPS)
    machine = {name: measure.machine()[name] for name in ("processor", "cores", "date")}
    command = "python tools/draw_pictures.py --record timeline"
    content = {"command": command, "machine": machine, **timeline.as_dict(found)}
    _write(args.measured / "step-timeline.json", content)
    print(found.sentence())
    return 0


def record_scaling(args: argparse.Namespace) -> int:
    """Run the training benchmark and keep its figures; its exit status."""
    command = [sys.executable, str(ROOT / "scripts" / "bench_training.py"), *BENCHMARK]
    command += ["--candidates", CANDIDATES]
    if args.torch_python:
        command += ["--torch-python", args.torch_python]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.json"
        status = subprocess.run([*command, "--json", str(path)]).returncode
        record = scaling.condensed(_read(path))
    asked = "python tools/draw_pictures.py --record scaling"
    _write(args.measured / "scaling.json", {"command": asked, **record})
    return status


RECORDERS = {"timeline": record_timeline, "scaling": record_scaling}


def check(folder: Path, measured: Path = MEASURED) -> int:
    """Name the pictures in ``folder`` that are not what would be drawn; 1 if there are any."""
    with tempfile.TemporaryDirectory() as fresh:
        draw(Path(fresh), measured)
        names = sorted(
            {path.name for place in (folder, Path(fresh)) for path in place.glob("*.svg")}
        )
        wrong = [name for name in names if not same(folder / name, Path(fresh) / name)]
    for name in wrong:
        print(f"{folder / name} is not what would be drawn", file=sys.stderr)
    if wrong:
        print("to draw them again: python tools/draw_pictures.py", file=sys.stderr)
    return 1 if wrong else 0


def same(path: Path, other: Path) -> bool:
    """Whether two pictures have the same words, and the same shapes in the same places."""
    if not (path.exists() and other.exists()):
        return False
    (shapes, spoken), (others, others_spoken) = content(path), content(other)
    return (
        spoken == others_spoken
        and set(shapes) == set(others)
        and all(
            abs(a - b) <= TOLERANCE for name in shapes for a, b in zip(shapes[name], others[name])
        )
    )


def content(path: Path) -> tuple[dict[str, tuple[float, ...]], list[str]]:
    """By the name of a shape its left, top, right and bottom in points; and all words, sorted.

    Shapes are what has an id 'KIND-...' of the drawing's own. matplotlib keeps words that it draws
    as outlines in comments.
    """
    builder = ElementTree.TreeBuilder(insert_comments=True)
    root = ElementTree.fromstring(path.read_bytes(), ElementTree.XMLParser(target=builder))
    shapes, spoken = {}, []
    for element in root.iter():
        if element.tag is ElementTree.Comment:
            spoken.append(str(element.text).strip())
        elif element.tag in (f"{SVG}title", f"{SVG}desc"):
            spoken.append(str(element.text))
        elif "-" in element.get("id", "") and element.tag == f"{SVG}g":
            paths = [found.get("d", "") for found in element.iter(f"{SVG}path")]
            numbers = [float(n) for d in paths for n in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", d)]
            xs, ys = numbers[::2], numbers[1::2]
            if xs:
                shapes[element.get("id", "")] = (min(xs), min(ys), max(xs), max(ys))
    return shapes, sorted(spoken)


if __name__ == "__main__":
    sys.exit(main())
