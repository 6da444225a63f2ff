"""verify --report as a whole on simulated GPUs: a process of the command, and what it wrote."""

import json
import os
import subprocess
import sys

import pytest
from cuda_sim import environment


def run(folder, **options):
    """Run the command on two simulated GPUs; return how it ended, the parts and the page."""
    path = folder / "report.json"
    command = [sys.executable, "-m", "gluonpar", "verify", "--device", "gpu", "--report", path]
    done = subprocess.run(
        command,
        env={**os.environ, **environment(num_devices=2, bytes=4 << 30, **options)},
        capture_output=True,
        text=True,
    )
    report = json.loads(path.read_text(), parse_constant=pytest.fail)
    parts = {part["name"]: part for part in report["parts"]}
    return done, parts, path.with_suffix(".html").read_text()


@pytest.mark.slow
def test_every_command_succeeds_and_no_time_is_a_result(tmp_path):
    # verify finds neither atomics nor TF32.
    done, parts, page = run(tmp_path, peers="none", atomics=1, tf32=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no peer access: copies of GPUs 0-1 go" in parts["doctor"]["output"]
    assert "all is right" in parts["verify"]["output"] and "Simulated GPU 1" in page
    assert len(parts) == 5
    for name in [*parts][2:]:
        assert "simulated" in parts[name]["refused"] and parts[name]["result"] is None
        assert f"No result: {parts[name]['refused']}" in page


@pytest.mark.slow
def test_a_gpu_that_fails_ends_no_report(tmp_path):
    done, parts, page = run(tmp_path, fail_after="1:60")
    assert done.returncode == 1
    assert parts["verify"]["exit_code"] == 1 and parts["profile of 1 device"]["exit_code"] == 0
    assert "an illegal memory access" in parts["verify"]["output"]
    assert "WRONG" in page
