"""verify --report as a whole on simulated GPUs: a process of the command, and what it wrote."""

import itertools
import json
import math
import os
import subprocess
import sys

import pytest
from cuda_sim.environment import environment


def run(folder, k, **options):
    """Run the command on ``k`` simulated GPUs; return how it ended, the report and the page."""
    path = folder / "report.json"
    command = [sys.executable, "-m", "gluonpar", "verify", "--device", "gpu", "--report", path]
    done = subprocess.run(
        [*command, "--seconds", "1", "--batch-size", "1"],
        env={**os.environ, **environment(num_devices=k, bytes=4 << 30, **options)},
        capture_output=True,
        text=True,
    )
    report = json.loads(path.read_text(), parse_constant=pytest.fail)
    return done, report, path.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("k", "peers", "staged"),
    [(2, "none", "0-1"), pytest.param(3, "0-1", "0-2, 1-2", marks=pytest.mark.slow)],
)
def test_every_part_has_figures_and_no_finding_rests_on_times(k, peers, staged, tmp_path):
    # The self test finds neither atomics nor TF32.
    done, report, page = run(tmp_path, k, peers=peers, atomics=1, tf32=1)
    assert report["failed"] == report["self test"]["failures"] == []
    findings = {finding["topic"]: finding["text"] for finding in report["findings"]}
    wrong = [finding for finding in report["findings"] if finding["state"] == "wrong"]
    assert (done.returncode, wrong) == (0, []), done.stderr

    assert report["simulated"] and "times mean nothing" in findings["devices"]
    assert f" {staged}:" in findings["peer access"]
    assert not any(unit in text for text in findings.values() for unit in (" us", " ms"))
    assert "Simulated GPU 1, compute capability 8.6, 4.0 GiB" in page
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert [title for title in titles if "simulated" not in title] == ["## Findings"]

    assert [gpu["index"] for gpu in report["devices"]["gpus"]] == [*range(k)]
    assert {"CUDA", "cuDNN", "NCCL"} <= {name for name, _ in report["devices"]["libraries"]}
    pairs = [(row["src"], row["dst"]) for row in report["copies"]["rows"]]
    assert pairs == [*itertools.permutations(range(k), 2)]
    reduced = {row["name"] for row in report["all-reduce"]["rows"]}
    assert {
        "star",
        "ring",
        "nccl",
        "mxnet device",
        "mxnet nccl",
    } <= reduced and "host" not in reduced
    stores = ("gluonpar", "mxnet device", "mxnet nccl")
    expected = {(name, n) for name in stores for n in range(2, k + 1)}
    expected |= {("gluonpar", 1), ("mxnet device", 1)}
    for workload in ("lenet", "resnet18"):
        rows = [row for row in report["steps"]["rows"] if row["workload"] == workload]
        assert {(row["name"], row["num_devices"]) for row in rows} == expected
    for part in ("copies", "all-reduce", "steps"):
        for row in report[part]["rows"]:
            assert min(row["seconds"]) > 0 and math.isfinite(row["median_seconds"])


@pytest.mark.slow
def test_a_gpu_that_fails_ends_no_report(tmp_path):
    done, report, page = run(tmp_path, 2, fail_after="1:60")
    assert done.returncode == 1, done.stderr
    wrong = [finding for finding in report["findings"] if finding["state"] == "wrong"]
    assert {"self test", "lenet", "resnet18"} <= {finding["topic"] for finding in wrong}
    failures = [finding["text"] for finding in wrong if finding["topic"] == "self test"]
    assert all("an illegal memory access" in text for text in failures)
    assert all(finding["text"] in page for finding in wrong)
    alone = {row["name"] for row in report["steps"]["rows"] if row["num_devices"] == 1}
    assert alone == {"gluonpar", "mxnet device"}  # the other GPU works
