"""A report as a page of Markdown: where it ran, what was found, and tables of the medians."""

from __future__ import annotations

from typing import Any, Iterator

from gluonpar.diagnostics.doctor.checks import NOTE, WRONG
from gluonpar.diagnostics.report import conclusions

MARKS = {WRONG: "**wrong** ", NOTE: "note: "}


def page(report: dict[str, Any]) -> str:
    """Return the page of a report that has its findings."""
    return "\n\n".join([*_header(report), *_findings(report), *_tables(report)]) + "\n"


def _header(report: dict[str, Any]) -> Iterator[str]:
    devices, machine = report["devices"], report["machine"]
    yield f"# gluonpar on {', '.join(devices['names'])}"
    gpus = [
        f"- gpu {gpu['index']}: {gpu['name']}, compute capability "
        f"{'.'.join(map(str, gpu['capability']))}, {gpu['memory_bytes'] / 2**30:.1f} GiB"
        for gpu in devices["gpus"]
    ]
    yield "\n".join(gpus) or "; ".join(machine["gpus"]) or "No GPU."
    versions = [f"{name} {machine[name]}" for name in ("gluonpar", "mxnet", "numpy", "python")]
    versions += [" ".join(library) for library in devices["libraries"]]
    yield (
        f"{machine['processor']}, {machine['cores']} cores usable; {', '.join(versions)}; "
        f"{' and '.join(machine['wheels'])}; {machine['date']}."
    )
    yield f"`{report['command']}` took {report['took_seconds']:.0f} s."


def _findings(report: dict[str, Any]) -> Iterator[str]:
    yield "## Findings"
    lines = []
    for found in report["findings"]:
        remedy = f" -> {found['remedy']}" if found["remedy"] else ""
        mark = MARKS.get(found["state"], "")
        lines.append(f"- {mark}{found['topic']}: {found['text']}{remedy}")
    yield "\n".join(lines)


def _tables(report: dict[str, Any]) -> Iterator[str]:
    where = " (simulated GPUs: times mean nothing)" if conclusions.simulated(report) else ""
    names, copies = report["devices"]["names"], report["copies"]["rows"]
    if copies:
        size = conclusions.size(copies[0]["num_bytes"])
        yield f"## Copies of {size} between devices, GB/s{where}"
        cells = {(src, dst): "" for src in names for dst in names}
        for row in copies:
            cells[names[row["src"]], names[row["dst"]]] = f"{row['algbw']:.2f}"
        yield _table("from, to", cells)
    reduced = report["all-reduce"]
    if reduced["rows"]:
        yield f"## All-reduce: us (busbw in GB/s){where}"
        chosen = {choice["num_bytes"]: choice["algorithm"] for choice in reduced["choices"]}
        cells = {}
        for row in reduced["rows"]:
            mark = "*chosen* " if chosen[row["num_bytes"]] == row["name"] else ""
            size = conclusions.size(row["num_bytes"])
            figures = f"{1e6 * row['median_seconds']:.1f} ({row['busbw']:.2f})"
            cells[row["name"], size] = mark + figures
        yield _table("", cells)
    for workload in dict.fromkeys(row["workload"] for row in report["steps"]["rows"]):
        rows = [row for row in report["steps"]["rows"] if row["workload"] == workload]
        per_device = rows[0]["batch_size"] // rows[0]["num_devices"]
        yield f"## A step of {workload}, {per_device} images per device: ms (images/s){where}"
        cells = {}
        for row in rows:
            figures = f"{1e3 * row['median_seconds']:.2f} ({row['images_per_second']:.0f})"
            cells[row["name"], conclusions.number(row["num_devices"])] = figures
        yield _table("", cells)


def _table(corner: str, cells: dict[tuple[str, str], str]) -> str:
    """Return a table of ``cells``, by row and column; "-" where there is none."""
    columns = list(dict.fromkeys(column for _, column in cells))
    lines = [[corner, *columns], ["---"] * (len(columns) + 1)]
    for row in dict.fromkeys(row for row, _ in cells):
        lines.append([row, *(cells.get((row, column), "-") for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
