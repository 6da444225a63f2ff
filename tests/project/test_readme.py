"""The example program and the two READMEs. test_docs.py runs the README's code blocks."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_the_custom_loop_uses_only_allreduce_and_converges():
    source = (ROOT / "examples" / "custom_loop.py").read_text()
    assert re.findall(r"^.*gluonpar.*import.*$", source, re.M) == ["from gluonpar import allreduce"]
    assert len(source.splitlines()) < 40
    done = subprocess.run(
        [sys.executable, "examples/custom_loop.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, "w = [ 2.  -3.4], b = 4.20\n"), done.stderr


def test_the_chinese_readme_has_the_same_blocks_pictures_and_figures():
    ours, theirs = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    fenced = re.compile(r"^```.*?^```$", re.S | re.M)
    pictures = re.compile(r"^!\[.*?\]\((.*?)\)$", re.M)
    assert fenced.findall(theirs) == fenced.findall(ours)
    chinese = [re.sub(r"(\.\w+)$", r".zh-CN\1", name) for name in pictures.findall(ours)]
    assert pictures.findall(theirs) == [
        translated if (ROOT / translated).exists() else name
        for name, translated in zip(pictures.findall(ours), chinese)
    ]
    assert len(fenced.findall(ours)) > 10 and len(pictures.findall(ours)) >= 3
    assert theirs.count("\n## ") == ours.count("\n## ")


# The rows of the table of speeds, in order.
CANDIDATES = (
    "gluonpar",
    "no exchange",
    "gluonpar trainer",
    "trainer gluonpar",
    "one context imported",
)
CANDIDATES += ("one context", "trainer device", "book", "tensorflow mirrored", "torch ddp")
CANDIDATES += ("jax shard_map",)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_table_of_speeds_is_the_recorded_run_that_the_picture_is_drawn_from(name):
    recorded = json.loads((ROOT / "docs" / "measured" / "scaling.json").read_text())["rows"]
    medians = {
        (row["name"], row["num_devices"]): f"{1e3 * row['median_seconds']:.0f}" for row in recorded
    }
    rows = re.search(r"^\| \| K = 1 .*\n\|---.*\n((?:\|.*\n)+)", (ROOT / name).read_text(), re.M)[1]
    shown = [[cell.strip(" *") for cell in row.split("|")[2:-1]] for row in rows.splitlines()]
    assert shown == [[medians[row, k] for k in (1, 2, 4)] for row in CANDIDATES]
