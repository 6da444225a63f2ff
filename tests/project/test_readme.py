"""The example program, the two READMEs, and figures that stand on several pages.

test_docs.py runs the READMEs' code blocks.
"""

import collections
import importlib.metadata
import inspect
import json
import pathlib
import re

import processes
import pytest

import gluonpar
from gluonpar.install import driver, startup

ROOT = pathlib.Path(__file__).parents[2]
READMES = ("README.md", "README.zh-CN.md")


@pytest.mark.slow
def test_the_custom_loop_uses_only_allreduce_grads_and_converges():
    source = (ROOT / "examples" / "custom_loop.py").read_text()
    assert re.findall(r"^.*gluonpar.*import.*$", source, re.M) == [
        "from gluonpar import allreduce_grads"
    ]
    assert len(source.splitlines()) < 40
    done = processes.end("examples/custom_loop.py", cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "w = [ 2.  -3.4], b = 4.20\n"), done.stderr


def test_the_chinese_readme_has_the_same_blocks_pictures_and_figures():
    ours, theirs = ((ROOT / name).read_text() for name in READMES)
    fenced = re.compile(r"^```.*?^```$", re.S | re.M)
    pictures = re.compile(r"^!\[.*?\]\((.*?)\)$", re.M)
    assert fenced.findall(theirs) == fenced.findall(ours)
    chinese = [re.sub(r"(\.\w+)$", r".zh-CN\1", name) for name in pictures.findall(ours)]
    assert pictures.findall(theirs) == [
        translated if (ROOT / translated).exists() else name
        for name, translated in zip(pictures.findall(ours), chinese)
    ]
    assert len(fenced.findall(ours)) == 5 and len(pictures.findall(ours)) == 1
    assert theirs.count("\n## ") == ours.count("\n## ")
    figures = [collections.Counter(re.findall(r"\d+(?:[.,-]\d+)*", t)) for t in (ours, theirs)]
    assert figures[0] == figures[1]


# The rows of the table of speeds, in order.
CANDIDATES = (
    *("gluonpar", "no exchange", "gluonpar trainer", "trainer gluonpar", "one context imported"),
    *("one context", "trainer device", "book", "tensorflow mirrored", "torch ddp"),
    "jax shard_map",
)


def test_the_table_of_speeds_is_the_recorded_run_that_the_picture_is_drawn_from():
    recorded = json.loads((ROOT / "docs" / "measured" / "scaling.json").read_text())["rows"]
    medians = {
        (row["name"], row["num_devices"]): f"{1e3 * row['median_seconds']:.0f}" for row in recorded
    }
    page = (ROOT / "docs" / "performance.md").read_text().partition("\n## Over K\n")[2]
    rows = re.search(r"^\| \| K = 1 .*\n\|---.*\n((?:\|.*\n)+)", page, re.M)[1]
    shown = [[cell.strip(" *") for cell in row.split("|")[2:-1]] for row in rows.splitlines()]
    assert shown == [[medians[row, k] for k in (1, 2, 4)] for row in CANDIDATES]


PAGES = [path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]]
PAGES = {path.name: path.read_text() for path in PAGES if path.name != "CHANGELOG.md"}
VERSIONS = re.findall(r":: Python :: (\d\.\d+)", str(importlib.metadata.metadata("gluonpar")))
OLDEST, NEWEST = (
    "{}.{}".format(*pair) for pair in (driver.OLDEST_CAPABILITY, driver.NEWEST_CAPABILITY)
)


@pytest.mark.parametrize(
    ("pattern", "figures"),
    [
        (r"\bgluonpar (\d+\.\d+\.\d+),", (gluonpar.__version__,)),
        (r"x86-64 Linux(?:, |、)Python (3\.\d+) (?:to|到) (3\.\d+)", (VERSIONS[0], VERSIONS[-1])),
        (r"capability (?:is not between )?(\d\.\d) (?:to|and) (\d\.\d)", (OLDEST, NEWEST)),
        (r"(?:newer than compute capability|计算能力高于) (\d\.\d)", (NEWEST,)),
        (r"GOMP_SPINCOUNT=(\d+)", (startup.SPIN["GOMP_SPINCOUNT"],)),
        (
            r"buckets of (?:up to )?(\d+) MiB",
            (
                str(
                    inspect.signature(gluonpar.allreduce_many).parameters["bucket_bytes"].default
                    >> 20
                ),
            ),
        ),
    ],
)
def test_a_figure_is_the_package_s_on_every_page(pattern, figures):
    texts = {name: " ".join(text.split()) for name, text in PAGES.items()}
    shown = {name: set(re.findall(pattern, text)) for name, text in texts.items()}
    shown = {name: found for name, found in shown.items() if found}
    assert shown, "no page has it any more: remove it here"
    assert all(
        found == {figures[0] if len(figures) == 1 else figures} for found in shown.values()
    ), shown


def test_the_time_of_a_message_is_the_one_of_the_table_of_plans():
    """docs/algorithms.md derives 0.1 ms from two figures of a table on another page."""
    table = r"\| bytes \| host \| star \| ring .*\n.*\n\| 4 K \| \S+ \| (\d+) \| (\d+) "
    (measured,) = {pair for text in PAGES.values() for pair in re.findall(table, text)}
    star, ring = (int(us) / 1000 for us in measured)
    page = " ".join(PAGES["algorithms.md"].split())
    assert f"'star', 2 messages in 2 steps, takes {star:.2f} ms" in page
    assert f"'ring', 4 messages in 2 steps, {ring:.2f} ms" in page
    assert (f"{star / 2:.1f}", f"{ring / 4:.1f}") == ("0.1", "0.1")
