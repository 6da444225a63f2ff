"""README and the examples: what they show is what happens."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_every_python_block_shows_its_output():
    assert len(BLOCKS) == (ROOT / "README.md").read_text().count("```python") >= 3


@pytest.mark.parametrize(("code", "output"), BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_prints_what_stands_below_it(code, output):
    done = run("-c", code)
    assert (done.returncode, done.stdout) == (0, output), done.stderr


def test_the_loop_of_ones_own_takes_only_allreduce_and_finds_the_line():
    source = (ROOT / "examples" / "custom_loop.py").read_text()
    assert re.findall(r"^.*gluonpar.*import.*$", source, re.M) == ["from gluonpar import allreduce"]
    assert len(source.splitlines()) < 40
    done = run("examples/custom_loop.py")
    assert (done.returncode, done.stdout) == (0, "w = [ 2.  -3.4], b = 4.20\n"), done.stderr
