"""The fenced blocks of a Markdown page, and the output of those in Python.

As a script it runs the blocks of one page and prints the results as JSON, so that tests can run
each page in its own process. A block that begins by importing gluonpar is a program by itself; any
other block continues the one before it. A block with a title, such as title="examples/a.py" after
its language, quotes that file and is not run.
"""

import contextlib
import io
import json
import pathlib
import re
import sys
import traceback
from typing import NamedTuple, Optional

from tests.support import processes

FENCE = re.compile(r'^```(\w*)(?: title="([^"\n]+)")?\n(.*?)^```$', re.M | re.S)


class Block(NamedTuple):
    """A fenced block: language, text, first line, the output shown below it, and the title."""

    language: str
    text: str
    line: int
    output: Optional[str]
    title: Optional[str]


def blocks(page):
    """Return the page's fenced blocks in order."""
    found = list(FENCE.finditer(page))
    made = []
    for fence, following in zip(found, [*found[1:], None]):
        below = following is not None and not page[fence.end() : following.start()].strip()
        output = following[3] if below and not following[1] else None
        line = page.count("\n", 0, fence.start()) + 1
        made.append(Block(fence[1], fence[3], line, output, fence[2]))
    return made


def can_run(block):
    """Whether MXNet can run a block here: it computes in bfloat16 with AVX-512 only."""
    return "amp.init" not in block.text or "avx512bw" in pathlib.Path("/proc/cpuinfo").read_text()


def run(page, name):
    """Run the blocks in Python; return line, output and traceback (or None) of each."""
    namespace, outcomes = {}, []
    for block in blocks(page):
        if block.language != "python" or block.title or not can_run(block):
            continue
        if re.match(r"(import|from) gluonpar", block.text):
            namespace = {"__name__": "__main__"}
        printed, error = io.StringIO(), None
        try:
            code = compile("\n" * block.line + block.text, name, "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
        except Exception:
            error = traceback.format_exc()
        outcomes.append({"line": block.line, "printed": printed.getvalue(), "error": error})
    return outcomes


def outcomes(path, folder):
    """Run the page's blocks in a process of its own, in ``folder``; return outcomes by line."""
    done = processes.end(__file__, path, cwd=folder, seconds=900)
    assert done.returncode == 0, done.stderr
    return {outcome["line"]: outcome for outcome in json.loads(done.stdout)}


if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))  # of a clone: `tools`
    page = pathlib.Path(sys.argv[1])
    json.dump(run(page.read_text("utf-8"), page.name), sys.stdout)
