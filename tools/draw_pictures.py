"""Draw the READMEs' pictures: the ring, the training step, recorded runs.

    python tools/draw_pictures.py                    # write docs/pictures/*.svg and the page's data
    python tools/draw_pictures.py --record page      # photograph the page; needs chromium
    python tools/draw_pictures.py --record scaling --torch-python ~/torch/bin/python
        --tensorflow-python ~/tensorflow/bin/python --jax-python ~/jax/bin/python

docs/hooks/drawings.py draws the other plans when the site is built. timelines.js of
docs/assets/step-by-step is what docs/step-by-step.html plays; step-by-step.png is a picture of that
page, which --record page takes. scaling.svg shows docs/measured/scaling.json, which --record
scaling measures, on an otherwise idle machine: all candidates on all numbers of devices take turns,
so about 40 processes are in memory at once.

Exit status: 0, success; 1, a candidate of the benchmark failed; 2, wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Sequence

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "notebooks"))
try:
    import drawing
    from pictures import scaling, step, timelines
    from PIL import Image
except ImportError as error:
    remedy = "in a clone: pip install -e '.[cpu,plot]'"
    print(f"draw_pictures.py: error: {error} ({remedy})", file=sys.stderr)
    sys.exit(2)

PICTURES = ROOT / "docs" / "pictures"
TIMELINES = ROOT / "docs" / "assets" / "step-by-step" / "timelines.js"
SCALING = ROOT / "docs" / "measured" / "scaling.json"
PAGE = ROOT / "docs" / "step-by-step.html"
MOMENT = "lang=en&theme=light&algorithm=halving-doubling&with=ring&topology=ethernet&t=1220"
CANDIDATES = (
    "gluonpar,gluonpar trainer,trainer device,one context,one context imported,"
    "book,torch ddp,tensorflow mirrored,jax shard_map,no exchange"
)
LIBRARIES = ("torch", "tensorflow", "jax")
BENCHMARK = "--workload lenet --num-gpus 1,2,4 --device cpu --rounds 12 --steps 5"
BENCHMARK += " --interleave"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    help_ = "do this before drawing: scaling, page, or both"
    parser.add_argument("--record", metavar="NAMES", default="", help=help_)
    for library in LIBRARIES:
        help_ = f"an interpreter that has {library}, for --record scaling"
        parser.add_argument(f"--{library}-python", metavar="PATH", help=help_)
    args = parser.parse_args(argv)
    names = args.record.split(",") if args.record else []
    if not set(names) <= {"scaling", "page"}:
        parser.error(f"--record must name scaling or page, got {args.record}")
    pythons = {f"--{name}-python": getattr(args, f"{name}_python") for name in LIBRARIES}
    status = record_scaling(pythons) if "scaling" in names else 0
    draw(PICTURES)
    TIMELINES.write_text(timelines.text(), "utf-8")
    if "page" in names:
        photograph_page(PICTURES / "step-by-step.png")
    return status


def draw(folder: Path) -> None:
    """Write all pictures into ``folder``."""
    drawing.draw("ring", 4, folder / "ring.svg")
    step.draw(folder / "step.svg")
    step.draw(folder / "step.zh-CN.svg", step.CHINESE)
    record = json.loads(SCALING.read_text("utf-8"))
    note = (
        f"{_measured(record)}. Medians and quartiles of {record['arguments']['rounds']} rounds of "
        f"{record['arguments']['steps']} steps; all programs on all numbers of devices take "
        "turns. All devices share the cores. One context, the dashed grey line, uses all of them "
        "by itself: data parallelism gains as much as gluonpar's line is above it there."
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


def record_scaling(pythons: dict[str, str | None]) -> int:
    """Run the training benchmark and keep its figures; return its exit status."""
    command = [sys.executable, "-m", "benchmarks.training", *BENCHMARK.split()]
    command += ["--candidates", CANDIDATES]
    command += [word for option in pythons.items() if option[1] for word in option]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.json"
        status = subprocess.run([*command, "--json", str(path)], cwd=ROOT).returncode
        record = scaling.condensed(json.loads(path.read_text("utf-8")))
    command = "python tools/draw_pictures.py --record scaling"
    _write(SCALING, {"command": command, **record})
    return status


def photograph_page(picture: Path) -> None:
    """Draw docs/step-by-step.html at a moment, as a browser shows it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--user-data-dir={profile}", "--window-size=1180,890"]
        options += [f"--screenshot={picture}"]
        subprocess.run([browser, *options, f"{PAGE.as_uri()}#{MOMENT}"], check=True)
    with Image.open(picture) as image:
        few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    few.save(picture, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    sys.exit(main())
