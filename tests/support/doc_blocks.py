"""The fenced blocks of a Markdown page, and what those in Python print when they are run.

As a script it runs one page's and prints what came of each, as JSON: the tests give every page a
process of its own. A block that begins by importing gluonpar is a program by itself; any other goes
on from the block before it, as a reader does who types along.
"""

import contextlib
import io
import json
import pathlib
import re
import sys
import traceback
from typing import NamedTuple, Optional

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block: its language, its text, the line it starts on and the output shown below."""

    language: str
    text: str
    line: int
    output: Optional[str]


def blocks(page):
    """The page's fenced blocks in order."""
    found = list(FENCE.finditer(page))
    made = []
    for fence, following in zip(found, [*found[1:], None]):
        below = following is not None and not page[fence.end() : following.start()].strip()
        output = following[2] if below and not following[1] else None
        line = page.count("\n", 0, fence.start()) + 1
        made.append(Block(fence[1], fence[2], line, output))
    return made


def run(page, name):
    """Per block in Python, its line, what it printed, and the traceback if it failed."""
    namespace, outcomes = {}, []
    for block in blocks(page):
        if block.language != "python":
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


if __name__ == "__main__":
    page = pathlib.Path(sys.argv[1])
    json.dump(run(page.read_text("utf-8"), page.name), sys.stdout)
