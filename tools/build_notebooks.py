#!/usr/bin/env python
"""Assemble the walkthrough's notebooks from notebooks/walkthrough, run them and keep their outputs.

    python tools/build_notebooks.py             # run once, write both languages
    python tools/build_notebooks.py --texts     # keep the outputs, replace the text
    python tools/build_notebooks.py --run FILE  # run English with its solutions, write FILE only

``en.md`` and ``zh.md`` hold the text and ``cells.py`` the code, which both languages share. A line
``<!-- cell: NAME -->`` in the text is replaced by the code cell of that name. The text between
``<!-- solution: NAME -->`` and ``<!-- end -->`` becomes a folded block, together with the code of
that name from ``solutions.py`` and its output: that code is run at this place, but is no cell.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from typing import Iterator, Mapping, NamedTuple, Sequence

import nbclient
import nbformat
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

NOTEBOOKS = pathlib.Path(__file__).resolve().parents[1] / "notebooks"
SOURCE = NOTEBOOKS / "walkthrough"
FILES = {
    "en": NOTEBOOKS / "multi_gpu_walkthrough.ipynb",
    "zh": NOTEBOOKS / "multi_gpu_walkthrough.zh-CN.ipynb",
}
WORDS = {"en": ("Solution", "It prints:"), "zh": ("解答", "输出：")}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "name": "python", "pygments_lexer": "ipython3"},
}
MARK = re.compile(r"^<!-- (cell|solution): ([\w-]+) -->$", re.M)
END = "<!-- end -->"
SOLUTION = "solution"  # the metadata of a cell that is run but not kept

# d2l draws SVG, which JupyterLab does not show in a notebook from elsewhere until its cell is run.
# The committed outputs are PNG at twice the resolution.
PNG = """
from matplotlib_inline import backend_inline

_set_formats = backend_inline.set_matplotlib_formats
backend_inline.set_matplotlib_formats = lambda *formats: _set_formats("retina")
"""


class Piece(NamedTuple):
    """A piece of a Markdown file: text, the name of a cell, or a solution and its text."""

    kind: str
    name: str
    text: str


def code(path: pathlib.Path) -> dict[str, str]:
    """Return the cells of a Python file by name. Raises ValueError if two have one name."""
    _, *parts = re.split(r"^# %% ([\w-]+)\n", path.read_text("utf-8"), flags=re.M)
    names, cells = parts[::2], [cell.strip("\n") for cell in parts[1::2]]
    if len(set(names)) < len(names):
        raise ValueError(f"{path.name}: cells must have different names, got {', '.join(names)}")
    return dict(zip(names, cells))


def pieces(text: str) -> Iterator[Piece]:
    """Yield the pieces of a text. Raises ValueError for a solution without an end."""
    words, *marked = MARK.split(text)
    yield Piece("text", "", words.strip())
    for kind, name, rest in zip(marked[::3], marked[1::3], marked[2::3]):
        inside = ""
        if kind == "solution":
            if END not in rest:
                raise ValueError(f"solution {name} must end with {END}")
            inside, rest = rest.split(END, 1)
        yield Piece(kind, name, inside.strip())
        yield Piece("text", "", rest.strip())


def assemble(language: str, printed: Mapping[str, str] | None = None) -> NotebookNode:
    """Return a language's notebook without outputs; ``printed`` holds the solutions' output.

    Without ``printed``, each solution is followed by a code cell that runs it and that
    :func:`finish` removes.
    """
    cells, solutions = code(SOURCE / "cells.py"), code(SOURCE / "solutions.py")
    made, texts = [], 0
    for kind, name, text in pieces((SOURCE / f"{language}.md").read_text("utf-8")):
        if kind == "cell":
            made.append(new_code_cell(cells[name], id=name))
        elif kind == "solution":
            folded = _folded(text, solutions[name], (printed or {}).get(name, ""), WORDS[language])
            made.append(new_markdown_cell(folded, id=f"solution-{name}"))
            if printed is None:
                hidden = new_code_cell(solutions[name], id=f"run-{name}", metadata={SOLUTION: name})
                made.append(hidden)
        elif text:
            texts += 1
            made.append(new_markdown_cell(text, id=f"text-{texts}"))
    return new_notebook(cells=made, metadata=METADATA)


def _folded(text: str, solution: str, printed: str, words: Sequence[str]) -> str:
    parts = [
        f"<details>\n<summary><b>{words[0]}</b></summary>",
        text,
        f"```python\n{solution}\n```",
    ]
    if printed:
        parts.append(f"{words[1]}\n\n```text\n{printed.rstrip()}\n```")
    return "\n\n".join([*parts, "</details>"])


def execute(notebook: NotebookNode, seconds: int = 600) -> None:
    """Run all cells in place, with this Python. Raises CellExecutionError if one fails."""
    kernels = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)
    manager = KernelManager(kernel_name="python3", kernel_spec_manager=kernels)
    client = nbclient.NotebookClient(
        notebook,
        km=manager,
        timeout=seconds,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    )
    notebook.cells.insert(0, new_code_cell(PNG))
    client.execute()
    del notebook.cells[0]


def finish(notebook: NotebookNode) -> dict[str, str]:
    """Remove the solutions' cells from a notebook that has run, and what differs between runs.

    Returns the solutions' output by name.
    """
    printed = {}
    for cell in list(notebook.cells):
        if SOLUTION in cell.metadata:
            printed[cell.metadata[SOLUTION]] = "".join(out.get("text", "") for out in cell.outputs)
            notebook.cells.remove(cell)
    counted = (cell for cell in notebook.cells if cell.cell_type == "code")
    for number, cell in enumerate(counted, 1):
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
    notebook.metadata = nbformat.from_dict(METADATA)
    return printed


def with_outputs(language: str, run: NotebookNode, printed: Mapping[str, str]) -> NotebookNode:
    """Return a language's notebook with the outputs of ``run``, which has the same code."""
    notebook = assemble(language, printed)
    outputs = {cell.source: cell for cell in run.cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = outputs[cell.source].outputs
            cell.execution_count = outputs[cell.source].execution_count
    return notebook


def printed_in(notebook: NotebookNode, language: str) -> dict[str, str]:
    """Return the solutions' output by name, read from a finished notebook."""
    block = re.compile(rf"{WORDS[language][1]}\n\n```text\n(.*?)\n```\n\n</details>", re.S)
    solutions = {}
    for cell in notebook.cells:
        if cell.id.startswith("solution-"):
            match = block.search(cell.source)
            solutions[cell.id[len("solution-") :]] = match.group(1) if match else ""
    return solutions


def languages() -> list[str]:
    """Return the languages that have a text."""
    return [language for language in FILES if (SOURCE / f"{language}.md").exists()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--texts", action="store_true", help="keep the outputs, run nothing")
    parser.add_argument(
        "--run", metavar="FILE", help="run English with its solutions and write only FILE"
    )
    arguments = parser.parse_args(argv)
    if arguments.run:
        notebook = assemble("en")
        execute(notebook)
        nbformat.write(notebook, arguments.run)
        return 0
    if arguments.texts:
        run = nbformat.read(FILES["en"], as_version=4)
        printed = printed_in(run, "en")
    else:
        run = assemble("en")
        execute(run)
        printed = finish(run)
    for language in languages():
        notebook = with_outputs(language, run, printed)
        nbformat.validate(notebook)
        nbformat.write(notebook, FILES[language])
        print(f"{FILES[language].name}: {FILES[language].stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
