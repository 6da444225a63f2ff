"""Pages of this site that are made from files outside docs/: the notebooks and the Chinese README.

A notebook becomes a page of Markdown: its text, its code, and what the code printed and drew. On
the site a file has the path that it has in the repository, without docs/, so links between the
files can be converted (:func:`on_page_markdown`) and work in both places.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ("notebooks/multi_gpu_walkthrough.ipynb", "notebooks/multi_gpu_walkthrough.zh-CN.ipynb")
README, HOME = "README.zh-CN.md", {"README.md": "index.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]+)?\)")
HEADING = re.compile(r"^(#+ )(.*)$", re.M)


def on_files(files, config):
    """Add the pages and their pictures."""
    contents = {README: (ROOT / README).read_text("utf-8")}
    for picture in sorted((ROOT / "notebooks" / "pictures").glob("*.svg")):
        contents[picture.relative_to(ROOT).as_posix()] = picture.read_bytes()
    for path in NOTEBOOKS:
        notebook = json.loads((ROOT / path).read_text("utf-8"))
        plot = "图：" if ".zh-CN." in path else "Plot: "
        contents[f"{path[:-6]}.md"], drawn = _markdown(notebook, plot)
        contents.update({f"notebooks/{name}": data for name, data in drawn.items()})
    for path, content in contents.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Convert links between files of the repository; keep the text only if the site lacks one."""
    here = page.file.src_uri
    source = here if page.file.generated_by else f"docs/{here}"

    def convert(link: re.Match) -> str:
        mark, words, target, anchor = link.groups(default="")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        on_site = HOME.get(path) or re.sub(r"\.ipynb$", ".md", re.sub("^docs/", "", path))
        if files.get_file_from_path(on_site) is not None:
            to = posixpath.relpath(on_site, posixpath.dirname(here))
            return f"{mark}[{words}]({to}{anchor})"
        return words if (ROOT / path).exists() and not mark else link[0]

    return LINK.sub(convert, markdown)


def _markdown(notebook: dict, plot: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its plots by file name; ``plot`` begins their texts."""
    parts, drawn = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            # Headings get the anchors that they have in JupyterLab.
            source = HEADING.sub(lambda h: f"{h[0]} {{#{_anchor(h[2])}}}", source)
            parts.append(source.replace("<details>", '<details markdown="1">'))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name, width = f"plots/{cell['id']}.png", output["metadata"]["image/png"]["width"]
                drawn[name] = base64.b64decode(data["image/png"])
                size = ".wide-picture " if width > 600 else ""
                parts.append(f"![{plot}{cell['id']}]({name}){{ {size}width={width} }}")
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"``` {{ .text .printed .no-copy }}\n{text.rstrip()}\n```")
    return "\n\n".join(parts), drawn


def _anchor(heading: str) -> str:
    return heading.replace("`", "").strip().replace(" ", "-")
