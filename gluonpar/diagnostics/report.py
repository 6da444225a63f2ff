"""gluonpar verify --report FILE.json: run the commands in turn, and keep their output.

Each command runs in a process of its own, so one that fails or hangs does not end the report.
"""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Sequence

import mxnet as mx

from gluonpar.checkpoint import files
from gluonpar.diagnostics import harness
from gluonpar.diagnostics.doctor import Finding

FORMAT = 2  # of the JSON file
ALONE = "profile of 1 device"
TIMEOUT_SECONDS = 600  # of one command
MOST_EFFICIENCY = 1.1  # K devices are at most K times as fast as one, but for noise
STYLE = "body {margin: 2em auto; max-width: 72em; font-family: sans-serif} pre {overflow-x: auto}"


def check_path(path: str | os.PathLike) -> None:
    """Raise ValueError unless ``path`` ends in .json, and it and the page can be written."""
    if Path(path).suffix != ".json":
        raise ValueError(f"the report must be a file named *.json, got {path}")
    for each in (path, page_path(path)):
        try:
            files.check_replaceable(each)
        except OSError as error:
            raise ValueError(f"cannot write {each}: {error.strerror}") from error


def write(path: str | os.PathLike, ctx: Sequence[mx.Context]) -> int:
    """Run everything on the devices ``ctx``; write FILE.json and FILE.html; return the exit code.

    The commands' output is printed, too. The exit code is 0 if that of each command is.
    """
    report = collect(ctx)
    content = {path: json.dumps(report, indent=1) + "\n", page_path(path): page(report)}
    for file_path, written in content.items():
        with files.atomic_write(file_path) as file:
            file.write(written.encode())
    print(f"report: {path}, as a page: {page_path(path)}")
    return 1 if any(part["exit_code"] != 0 for part in report["parts"]) else 0


def page_path(path: str | os.PathLike) -> Path:
    """Return the path of the page beside that of the JSON file."""
    return Path(path).with_suffix(".html")


def collect(ctx: Sequence[mx.Context]) -> dict[str, Any]:
    """Run the commands on the devices ``ctx``; return their output and measurements, for JSON."""
    report = {"format": FORMAT, "machine": harness.machine(), "devices": [*map(str, ctx)]}
    report["parts"] = parts = []
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in commands(ctx[0].device_type, len(ctx), folder).items():
            print(f"\n{name}: gluonpar {' '.join(arguments)}", flush=True)
            parts.append({"name": name, **run(arguments)})
            parts[-1]["refused"] = reason = refusal(parts[-1], report)
            print(parts[-1]["output"], flush=True)
            if reason:
                parts[-1]["result"] = None
                print(f"{name}: no result: {reason}", flush=True)
    return report


def commands(kind: str, num_devices: int, folder: str) -> dict[str, list[str]]:
    """Return the arguments of ``gluonpar`` by the name of the part."""
    on_all = ["--device", kind, "--num-gpus", str(num_devices)]
    bench = ["bench", *on_all, "--json", os.path.join(folder, "bench.json")]
    parts = {"doctor": ["doctor", "--json"], "verify": ["verify", *on_all]}
    if num_devices > 1:
        parts["bench"] = bench
    for k in sorted({1, num_devices}):
        name = ALONE if k == 1 else f"profile of {k} devices"
        train = ["train", "--device", kind, "--num-gpus", str(k), "--dataset", "synthetic"]
        # The profile is of the first epoch, the speed that of the second.
        train += ["--epochs", "2", "--profile", "--history", os.path.join(folder, f"{k}.json")]
        parts[name] = train
    return parts


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """Run a command of ``gluonpar``; return its exit code (None: it hangs), output and result.

    The result is the JSON that it writes.
    """
    start, command = time.monotonic(), [sys.executable, "-m", "gluonpar", *arguments]
    options = {"stdin": subprocess.DEVNULL, "capture_output": True}
    try:
        done = subprocess.run(command, timeout=TIMEOUT_SECONDS, **options)
        code, streams, ending = done.returncode, (done.stdout, done.stderr), ""
    except subprocess.TimeoutExpired as error:
        code, streams = None, (error.stdout or b"", error.stderr or b"")
        ending = f"\nended: no result within {TIMEOUT_SECONDS} s"
    output, errors = (stream.decode(errors="replace") for stream in streams)
    part = {"command": ["gluonpar", *arguments], "seconds": time.monotonic() - start}
    part.update(exit_code=code, output=f"{output}{errors}{ending}", result=None)
    file = Path(arguments[-1])
    if arguments[0] == "doctor" and code in (0, 1):
        part["result"] = json.loads(output)
        findings = [Finding(**finding) for finding in part["result"]["findings"]]
        part["output"] = "\n".join(map(str, findings))
    elif code == 0 and file.suffix == ".json":
        part["result"] = json.loads(file.read_text("utf-8"))
    return part


def refusal(part: dict[str, Any], report: dict[str, Any]) -> str:
    """Return why the figures of the part cannot be true; "" if they can, or there are none."""
    if part["result"] is None or part["name"] == "doctor":
        return ""
    simulated = any("simulated" in gpu.lower() for gpu in report["machine"]["gpus"])
    if simulated and report["devices"][0].startswith("gpu"):
        return "times of simulated GPUs mean nothing"
    alone = next((each["result"] for each in report["parts"] if each["name"] == ALONE), None)
    if part["name"] == "bench" or not alone:
        return ""
    num_devices = len(report["devices"])
    one, all_ = (result[-1]["images_per_second"] for result in (alone, part["result"]))
    if all_ <= MOST_EFFICIENCY * num_devices * one:
        return ""
    return (
        f"{num_devices} devices cannot have {all_:.0f} images/s where one has {one:.0f}: "
        "the machine was busy when one of them was measured; measure again while nothing else runs"
    )


def page(report: dict[str, Any]) -> str:
    """Return the report as an HTML page: where it ran, and each command's output."""
    title = html.escape(f"gluonpar on {', '.join(report['devices'])}")
    machine = "".join(f"<li>{k}: {html.escape(str(v))}" for k, v in report["machine"].items())
    lines = [f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>']
    lines += [f"<style>{STYLE}</style>", f"<h1>{title}</h1>", f"<ul>{machine}</ul>"]
    for part in report["parts"]:
        ending = "did not end" if part["exit_code"] is None else f"exit code {part['exit_code']}"
        output = f"No result: {part['refused']}." if part["refused"] else part["output"]
        lines.append(f"<h2>{part['name']}: {ending}, {part['seconds']:.0f} s</h2>")
        lines.append(f"<p><code>{html.escape(' '.join(part['command']))}</code></p>")
        lines.append(f"<pre>{html.escape(output)}</pre>")
    return "\n".join([*lines, "</html>\n"])
