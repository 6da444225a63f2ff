"""verify --report as a whole on simulated GPUs: a process of the command, and what it wrote."""

import json

import pytest
from cuda_sim import environment
from processes import end


@pytest.mark.slow
def test_every_command_succeeds_and_no_time_is_a_result(tmp_path):
    path = tmp_path / "report.json"
    # verify finds neither atomics nor TF32.
    gpus = environment(num_devices=2, bytes=4 << 30, peers="none", atomics=1, tf32=1)
    done = end("-m", "gluonpar", "verify", "--device", "gpu", "--report", path, **gpus)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text(), parse_constant=pytest.fail)
    parts = {part["name"]: part for part in report["parts"]}
    page = path.with_suffix(".html").read_text()
    assert "no peer access: copies of GPUs 0-1 go" in parts["doctor"]["output"]
    assert "all is right" in parts["verify"]["output"] and "Simulated GPU 1" in page
    assert len(parts) == 5
    for name in [*parts][2:]:
        assert "simulated" in parts[name]["refused"] and parts[name]["result"] is None
        assert f"No result: {parts[name]['refused']}" in page
